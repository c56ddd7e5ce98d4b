"""Torch's, torchft's and Accelerate's ways of training on several hosts, beside every strategy here.

    python -m benchmarks.peers --data FOLDER

docs/peers.md says how it is measured.
"""
