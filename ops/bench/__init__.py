"""Measurements beside NVIDIA Dynamo's index, in one process and interleaved; `python -m ops.bench`."""
