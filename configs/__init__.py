"""Data that ships with the package: peaks of GPUs and configurations of models. No logic.

prometheus/ and grafana/ are for operators; they are not in the package.
"""
