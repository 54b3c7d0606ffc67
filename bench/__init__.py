"""Benchmarks that a person can run, with their workloads. Above service in the order of imports; nothing imports it but
the command `pagewalk bench`, lazily.
"""
