"""The `model_type` values of transformers: their settings, heads and tensor names.

`llama2c`, `e2k` and `g2p_en` are single files without a config.json; each module also says how
to recognize such a file.
"""
