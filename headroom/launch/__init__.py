"""The processes of a training that several make together: how they are started by PyTorch's own
launcher, what each of them does, and what it tells the one that asked for them. A process of a
rank imports neither Prefect nor MLflow.
"""
