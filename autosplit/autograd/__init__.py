"""The split backward as autograd and optimizers see it: pending work, lazy gradients."""
