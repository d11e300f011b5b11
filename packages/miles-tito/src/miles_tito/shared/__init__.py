"""What every Miles package uses and none should write again. Standard library alone, but for what a module names.

weightsync and quant, which others copy into their trees, import nothing of it.
"""
