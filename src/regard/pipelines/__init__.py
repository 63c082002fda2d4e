"""One pipeline per kind of data: detection, defaults, training and evaluation data, samples."""
