"""New weights by way of a store: trainer ranks put their shards there, followers beside engines fetch them.

Imports nothing: the command line reads `command` where torch is not needed.
"""
