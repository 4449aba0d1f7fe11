"""Remedies by the function that a line of the program calls."""

import pytest

from aorta.why.causes.rules import call_remedies, instead_of

ANY = frozenset({"any"})


@pytest.mark.parametrize(
    ("calls", "begins"),
    [
        (("profile.__exit__ of torch", "profile.__exit__ of torch"), "leave torch.profiler out"),
        (("np.choice",), "draw with numpy's Generator, np.random"),
        (("np.permutation",), "draw an order of all once"),
        (("Random.shuffle of python", "Random._randbelow of python"), "draw an order of all once"),
        (("Random.sample of python", "Random._randbelow of python"), "keep what is sampled in arrays"),
        (("np.randn",), "draw with numpy's Generator, for all samples"),
        (("Random.gauss of python",), "draw all numbers in one call"),
        (("torch.randn",), "draw as few numbers"),
        (("x.normal_",), "draw as few numbers"),
        (("Logger.info of python", "StreamHandler.emit of python"), "log and write"),
        (("SummaryWriter.add_scalar of torch", "Condition.wait of python"), "log and write"),
        (("dumps of python", "JSONEncoder.iterencode of python"), "log and write"),
        (("fh.write",), "log and write"),
        (("Tensor.__format__ of torch", "_tensor_str of torch"), "write no tensors into texts"),
        (("LightningModule.log of lightning", "batch_to of lightning"), "log few values"),
        (("Trainer.fit of lightning", "_ResultCollection._get_cache of lightning"), "log few values"),
        (("Trainer.fit of lightning", "LocalFileOpener.write of fsspec"), "save less often"),
        (
            ("Trainer.fit of lightning", "LocalFileOpener._open of fsspec"),
            "log and write in one step of N (log_",
        ),
        (("AbstractFileSystem.open of fsspec",), "copy it to a disk"),
        (("Normal.__init__ of torch", "_GreaterThan.check of torch"), "leave checks of values out"),
        (("_tensor_str of torch",), "write no tensors into texts"),
        (("Figure.savefig of matplotlib", "_encode_tile of PIL"), "draw figures"),
        (("f1_score of sklearn", "unique of numpy"), "compute metrics"),
        (("_no_grad_wrapper of torch", "_get_total_norm of torch"), "clip once a step"),
        (("Tensor.norm of torch", "norm of torch"), "look at all tensors"),
        (("torch.isnan",), "check values in one step of N"),
        (("torch.any",), "look at all tensors"),
        (("Module.train of torch",), "call train() and eval() where the mode changes"),
        (("deepcopy of python", "Parameter.__deepcopy__ of torch"), "copy into tensors that are kept"),
        (("Module.state_dict of torch", "Module._save_to_state_dict of torch"), "make lists of the tensors"),
        (("Tensor.lerp_",), "work on all tensors in one call"),
        (("_no_grad_embedding_renorm_ of torch",), "leave max_norm= of the embedding out"),
        (("torch.svd",), "where what it decomposes hardly changes"),
        (("NpzFile.__getitem__ of numpy", "_SharedFile.read of python"), "unpack once"),
        (("zlib.decompress",), "unpack once"),
        (("load of torch", "load_tensor of torch"), "load it once"),
        (("TarFile.open of python", "TarFile.next of python"), "unpack the archive"),
        (("cursor.execute",), "ask for all rows of a batch in one query"),
        (("csv.reader",), "parse it once"),
        (("vocabulary.index",), "keep the place of each entry in a dict"),
        (("linear_sum_assignment",), "make the costs of all samples"),
        (("np.where",), "look for it once"),
        (("warnings.warn",), "log and write"),
        (("pickle.loads",), "load it once"),
        (("Dataset.__getitem__ of h5py",), "read many rows in one call"),
        (("loads of python", "JSONDecoder.raw_decode of python"), "parse it once"),
        (("_LocationIndexer.__getitem__ of pandas", "_all of numpy"), "take columns as arrays"),
        (("concat of pandas", "concatenate_managers of pandas"), "keep what is logged in a list"),
        (("StandardScaler.transform of sklearn", "check_array of sklearn"), "fit and transform all samples"),
        (("Dataset.__getitem__ of datasets",), "ask for all rows of a batch"),
        (("os.listdir",), "list files once"),
        (("open.read",), "open files once"),
        (("urlopen of python", "SSLSocket.read of python"), "copy it to a disk"),
        (("run of python", "Popen._execute_child of python"), "start no process"),
        (("PreTrainedTokenizerBase.__call__ of transformers",), "tokenize all texts"),
        (("tokenizer.decode_batch",), "make texts of what a model predicts in one step"),
        (("PreTrainedTokenizerBase.batch_decode of transformers",), "make texts of what a model predicts"),
        (("PreTrainedTokenizerFast._decode of transformers",), "make texts of what a model predicts"),
        (("text.split",), "go through texts once"),
        (("sub of python",), "go through texts once"),
        (("hashlib.sha256",), "hash each sample once"),
        (("Image.convert of PIL", "ImageFile.load of PIL"), "decode images once"),
        (("Image.resize of PIL",), "change whole batches of tensors"),
        (("Compose.__call__ of torchvision", "Image.resize of PIL"), "change whole batches of tensors"),
        (("resample of torchaudio",), "make transforms once"),
        (("vectorize.__call__ of numpy",), "work on whole arrays"),
        (
            ("IndexMixin.__getitem__ of scipy", "_cs_matrix._get_submatrix of scipy"),
            "ask for all rows of a batch",
        ),
        (("zoom of scipy",), "compute it once for each sample"),
        (("pad_sequence of torch",), "put rows of like length"),
        (("torch.one_hot",), "leave class numbers"),
        (("sorted",), "sort what does not change"),
        (("x.tolist",), "keep values in tensors"),
        (("torch.stack",), "index one tensor of all samples"),
        (("DictConfig.__getattr__ of omegaconf",), "read settings"),
    ],
)
def test_what_a_line_calls_has_its_remedy(calls, begins):
    assert instead_of(calls, "program_code", ANY).set.startswith(begins)


@pytest.mark.parametrize("kind", ["between_steps", "pause"])
def test_a_model_that_is_called_behind_the_update_may_be_spared(kind):
    """In a step, it trains."""
    one = instead_of(("Linear.forward of torch", "Linear.forward of torch"), kind, ANY)
    assert one.set.startswith("take what it finds from the outputs of the pass that trains")


@pytest.mark.parametrize(
    "calls",
    [
        ("",),
        ("torch.matmul",),
        ("cross_entropy of torch",),
        ("Linear.forward of torch",),
        ("run",),
        ("torch.where",),
        ("VisionEncoderDecoderModel.prepare_decoder_input_ids_from_labels of transformers",),
        ("EncodecModel.decode of transformers",),
    ],
)
def test_what_is_not_known_to_be_done_better_has_none(calls):
    assert instead_of(calls, "program_code", ANY) is None


def test_numbers_are_drawn_on_the_device_where_there_is_one():
    assert instead_of(("torch.randn",), "program_code", ANY | {"on_device"}).set.startswith(
        "draw on the device"
    )


def test_values_are_sent_and_waits_are_waited_for_of_their_causes_alone():
    assert instead_of(("torch.tensor",), "program_code", ANY) is None
    assert instead_of(("torch.tensor",), "data_loading", ANY).set.startswith(
        "where samples are arrays, torch.from_numpy(np.stack"
    )
    walk = ("AddRandomWalkPE.forward of torch_geometric",)
    assert instead_of(walk, "data_loading", ANY).set.startswith("give what draws nothing at random")
    assert instead_of(walk, "program_code", ANY) is None  # a layer's
    assert instead_of(("time.sleep",), "pause", ANY).set.startswith("leave the sleep out")


def test_what_changes_what_is_computed_is_done_in_each_step():
    """Noise, orders, batches and what is made of them must not be taken in one step of N."""
    assert [one.set for one in call_remedies() if one.makes and "one step of N" in one.set] == []
