"""Read and write text: files with a size limit and typed errors, and figures as people write
them.
"""
