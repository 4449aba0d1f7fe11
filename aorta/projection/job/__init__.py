"""The job that is projected: the model's shapes, the plan that splits it over GPUs, its software."""
