"""Measuring: timers, ceilings of this machine, and the workloads that ``loraplex bench`` runs."""
