"""Sources that are files of arrays, images or tokens; how rows are split, scaled and labelled; the
cache of prepared arrays. It refuses every file that is not what it claims.

Front doors: fingerprint, image_folders, images, npy, npz, number_formats, prepared_cache,
row_parts, safetensors_file, scaling, source_data, split, target_encoding, tokens.
"""
