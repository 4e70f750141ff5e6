"""Which device a run gets and why not a better one; its precision, its limit and its readings. It
refuses a device that was asked for and cannot compute.
"""
