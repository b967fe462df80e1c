"""Captures that the tests make themselves: frames, files of every kind that holds them, and a whole cluster's traffic.

Everything is made from numbers in the code; the same call gives the same bytes on every machine.
"""
