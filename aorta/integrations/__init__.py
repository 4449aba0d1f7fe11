"""Records loops that live in libraries: one file and one line of the program per library.

    transformers.Trainer(..., callbacks=[aorta.integrations.transformers.AortaCallback("artifacts")])
    lightning.Trainer(..., callbacks=[aorta.integrations.lightning.AortaCallback("artifacts")])
    Fabric(..., callbacks=[aorta.integrations.lightning.AortaFabricCallback("artifacts")])
    optimizer = aorta.integrations.accelerate.record(accelerator, "artifacts")
    aorta.integrations.torchtitan.record("artifacts")        # in a module of --experimental.custom_import

loop.py has what they share: the calls that begin and end steps. `aorta run -- COMMAND` needs none of this: it
is for programs that log scalars or pass settings.
"""
