"""What is projected: the model's shapes, the plan that splits it over GPUs, the software that runs it."""
