"""Step time, throughput and memory of LLM training on hardware that is not here; no torch, no GPU.

From a job to its answer: model.py, plan.py and software.py say what runs; layers.py (with layer_parts.py
and experts.py) writes it as the operations of ops.py; prices.py asks gemm.py, sdpa.py and collectives.py for
their time; stages.py, streams.py, passes.py and chunks.py run a stage; pipeline.py joins stages; step.py adds
the rest, memory.py what is held, interval.py how sure it is. search.py and whatif.py ask for steps,
and anchor.py for a measured one; cli.py, options.py, job_file.py and output.py face the user.
"""
