"""One Prefect task a file, and what a run leaves behind: facts in, facts out, no tensor."""
