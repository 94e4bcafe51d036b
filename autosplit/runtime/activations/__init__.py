"""In-flight microbatch state: residuals between F, I and W, moved away or made again."""
