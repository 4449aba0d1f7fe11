"""Records loops that live in libraries: one line each.

    transformers.Trainer(..., callbacks=[aorta.integrations.transformers.AortaCallback("artifacts")])
    lightning.Trainer(..., callbacks=[aorta.integrations.lightning.AortaCallback("artifacts")])
    Fabric(..., callbacks=[aorta.integrations.lightning.AortaFabricCallback("artifacts")])
    optimizer = aorta.integrations.accelerate.record(accelerator, "artifacts")
    aorta.integrations.torchtitan.record("artifacts")        # in a module of --experimental.custom_import

`aorta run -- COMMAND` needs none of them: they are for programs that log, or pass settings.
"""
