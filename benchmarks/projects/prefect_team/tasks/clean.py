"""The team's own tasks."""


def drop_outliers(x, y):
    kept = y.abs() < 3 * y.std()
    return x[kept], y[kept]
