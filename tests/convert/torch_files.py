"""PyTorch's zip files, written by hand: no torch is needed."""

import io
import pickle
import zipfile


class Named:
    """Pickles as a global name."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class Call:
    """Pickles as a call of a global."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments


class Storage:
    """Pickles as a persistent id."""

    def __init__(self, *pid):
        self.pid = pid


class Pickler(pickle._Pickler):
    """Writes these as they are, where pickle would import the names."""

    def persistent_id(self, item):
        return item.pid if isinstance(item, Storage) else None

    def save_named(self, item):
        self.write(b"c" + f"{item.module}\n{item.name}\n".encode())

    def save_call(self, item):
        self.save(item.function)
        self.save(item.arguments)
        self.write(pickle.REDUCE)

    dispatch = pickle._Pickler.dispatch | {Named: save_named, Call: save_call}


def pickled(value):
    """Protocol 2, as torch writes it."""
    out = io.BytesIO()
    Pickler(out, protocol=2).dump(value)
    return out.getvalue()


FLOATS = Named("torch", "FloatStorage")
REBUILD = Named("torch._utils", "_rebuild_tensor_v2")


def tensor(key="0", size=6, offset=0, shape=(2, 3), strides=(3, 1), kind=FLOATS):
    storage = Storage("storage", kind, key, "cpu", size)
    return Call(
        REBUILD, storage, offset, shape, strides, False, Call(Named("collections", "OrderedDict"))
    )


def torch_file_of(path, weights):
    """A file with these float32 tensors, each in a storage of its own, as torch writes it."""
    state, first, *others = {}, *[value.tobytes() for value in weights.values()]
    for i, (name, value) in enumerate(weights.items()):
        strides = tuple(stride // 4 for stride in value.strides)
        state[name] = tensor(str(i), value.size, 0, value.shape, strides)
    extra = [(f"data/{i}", data) for i, data in enumerate(others, 1)]
    return torch_file(path, state, data=first, extra=extra)


def torch_file(path, state, *, data=bytes(range(24)), compression=zipfile.ZIP_STORED, extra=()):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", state if isinstance(state, bytes) else pickled(state))
        archive.writestr("archive/data/0", data)
        for name, content in extra:
            archive.writestr(f"archive/{name}", content)
    return path
