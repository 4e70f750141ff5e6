"""Names the figures that an evaluation gives of each task: the one list that whoever measures,
chooses, refuses or shows a figure asks. A metric of the user's own must bear none of these names,
since it would take the figure's place. It imports nothing, so that settings may ask it.
"""

from __future__ import annotations

# Of each task: what every evaluation of it gives, and by which weights may be chosen.
TASK_FIGURES = {
    "classification": ("accuracy", "balanced_accuracy", "macro_f1", "loss"),
    "multilabel": ("accuracy", "f1", "macro_f1", "average_precision", "loss"),
    "regression": ("r2", "mae", "rmse", "loss"),
    "tokens": ("perplexity", "loss"),
    "own": ("loss",),  # of a model that gives its loss itself, for labels of any shape
}
TOP5 = "top5_accuracy"  # of a classification with more than ten classes
LARGEST_CLASS_SHARE = "largest_class_share"  # of one whose rows are nearly all of one class
LOWER_IS_BETTER = ("perplexity", "loss", "mae", "rmse")
# Beside the figures of an evaluation, for the warnings about it, and logged nowhere. Of amounts:
# the error that the best single answer would have, where the model's is not smaller beyond chance.
MEAN, MEDIAN = "as the mean", "as the median"
ALIKE = "alike"  # of an evaluation that gave every row the same answer
BY_CHANCE = "by chance"  # of one whose classes have nothing to do with those of the rows
R2_ERROR = "error of r2"  # its standard error
UNLOGGED = (ALIKE, MEAN, MEDIAN, BY_CHANCE, R2_ERROR)
TAKEN = frozenset(
    (*(name for names in TASK_FIGURES.values() for name in names), TOP5, LARGEST_CLASS_SHARE)
) | frozenset(UNLOGGED)
