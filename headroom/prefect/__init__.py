"""What a run needs of Prefect: its server of a single run, what is asked of a server in plain HTTP,
tasks as this project runs them, and the flow run that this process is.
"""
