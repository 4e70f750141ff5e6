"""Several processes that train one model: who they are, what they agree on and how a model is
split among them. It refuses to train where they were started with different things.
"""
