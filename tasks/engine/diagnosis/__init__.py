"""A failed step told by the names of what met in it: parameter, buffer, entry of the batch,
layer, line. It keeps no tensor of the failure.

Front doors: failed_step, tensor_names.
"""
