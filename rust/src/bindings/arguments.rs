// SPDX-License-Identifier: Apache-2.0
//! Converts Python's arguments to machine types, with stand-ins for those that have no machine
//! form.
//! An argument without a machine form (an id that is not a str, a number that is too big or not a
//! number) does not end the call here, since the twin may find another error first. It is replaced
//! by a stand-in that the twin must refuse; the fields of the error then have the argument itself.

use pyo3::exceptions::PyOverflowError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyInt, PyList, PyTuple};
use smallvec::SmallVec;

use crate::bindings::errors::{APART, Given, ends_call, raise, wrong_argument, wrong_config};
use crate::bindings::lists::exact_ids;
use crate::bindings::values::packed_ids;
use crate::pool::priority_eviction::PoolEviction;
use crate::types::commands::Tier;
use crate::types::config::{Config, Duplicates, Eviction, NO_LIMIT, Publish};
use crate::types::errors::Error;
use crate::types::groups::{Group, KINDS};
use crate::types::keys::Hashing;
use crate::types::retention::{Piece, Wish};
use crate::types::slot_request::RequestedHit;
use crate::types::values::GivenHashes;

/// Far above every count, block and position of the twin; sums of a few of them fit.
const FAR: i64 = 1 << 61;
/// The most stand-ins of one call that can be distinguished.
const MAX_APART: usize = 1 << 10;

/// Arguments by their kind, so that the stub can name it.
macro_rules! arguments {
    ($($(#[$doc:meta])* $name:ident: $hint:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name<'a, 'py>(pub(crate) Borrowed<'a, 'py, PyAny>);

        impl<'a, 'py> FromPyObject<'a, 'py> for $name<'a, 'py> {
            type Error = std::convert::Infallible;

            #[cfg(feature = "stubs")]
            const INPUT_TYPE: pyo3::inspect::PyStaticExpr = crate::bindings::hints::$hint;

            fn extract(object: Borrowed<'a, 'py, PyAny>) -> Result<Self, Self::Error> {
                Ok($name(object))
            }
        }
    )*};
}

arguments! {
    /// A `Config`.
    ConfigArg: CONFIG;
    /// A `KvCacheRetentionConfig`.
    RetentionArg: RETENTION;
    /// A `Request`.
    RequestArg: REQUEST;
    /// A request id.
    IdArg: STR;
    /// Request ids.
    IdsArg: IDS;
    /// A number of tokens or blocks, or of a batch or operation.
    CountArg: INT;
    /// Block hashes.
    HashesArg: HASHES;
    /// True or False.
    FlagArg: BOOL;
    /// A block id.
    BlockArg: INT;
    /// Block ids.
    BlocksArg: BLOCK_IDS;
    /// A `Hit`, or None.
    HitArg: MAYBE_HIT;
    /// Tokens, or rows: a list or a buffer.
    TokensArg: ANY;
    /// "device" or "host".
    TierArg: STR;
    /// A number, or None.
    NumberArg: ANY;
}

/// A number of tokens that may be left out.
#[derive(Clone, Copy)]
pub(crate) struct MaybeCount<'a, 'py>(pub(crate) Option<CountArg<'a, 'py>>);

impl<'a, 'py> FromPyObject<'a, 'py> for MaybeCount<'a, 'py> {
    type Error = std::convert::Infallible;

    #[cfg(feature = "stubs")]
    const INPUT_TYPE: pyo3::inspect::PyStaticExpr = crate::bindings::hints::INT;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> Result<Self, Self::Error> {
        Ok(MaybeCount(Some(CountArg(object))))
    }
}

impl<'py> Given<'py> {
    /// A request id.
    pub(crate) fn name<'a>(&mut self, id: Borrowed<'a, 'py, PyAny>) -> &'a str {
        match <&str>::extract(id) {
            Ok(name) if !name.is_empty() => name,
            _ => {
                self.unnamed.get_or_insert_with(|| id.to_owned());
                ""
            }
        }
    }

    /// Request ids.
    pub(crate) fn names<'a>(&mut self, ids: &'a [Bound<'py, PyAny>]) -> SmallVec<[&'a str; 4]> {
        ids.iter().map(|id| self.name(id.as_borrowed())).collect()
    }

    /// Read a count.
    pub(crate) fn count(&mut self, value: CountArg<'_, 'py>) -> PyResult<i64> {
        match self.integer(value.0)? {
            Some(number) => Ok(number),
            None => Ok(self.stand_in(true, value.0.to_owned())),
        }
    }

    /// Read a count, None if it was omitted.
    pub(crate) fn maybe_count(&mut self, value: MaybeCount<'_, 'py>) -> PyResult<Option<i64>> {
        value.0.map(|value| self.count(value)).transpose()
    }

    /// A block id.
    pub(crate) fn block(&mut self, block: Borrowed<'_, 'py, PyAny>) -> PyResult<i64> {
        match self.integer(block)? {
            Some(number) => Ok(number),
            None => Ok(self.stand_in(true, block.to_owned())),
        }
    }

    /// Block ids.
    pub(crate) fn blocks(&mut self, blocks: BlocksArg<'_, 'py>) -> PyResult<Vec<i64>> {
        if let Some(ids) = exact_ids(blocks.0) {
            return Ok(ids.into_iter().map(i64::from).collect());
        }
        let _reading = self.reading()?;
        items(blocks.0)?.iter_borrowed().map(|block| self.block(block)).collect()
    }

    /// Whether a flag is set; WrongArgument for anything but a bool, or a scalar whose dtype is
    /// bool.
    pub(crate) fn flag(&self, name: &str, object: FlagArg<'_, 'py>) -> PyResult<bool> {
        if let Ok(flag) = object.0.cast::<PyBool>() {
            return Ok(flag.is_true());
        }
        let _reading = self.reading()?;
        let read = || -> PyResult<Option<bool>> {
            let dtype = object.0.getattr("dtype")?.str()?;
            let is_flag = ["bool", "torch.bool"].contains(&dtype.to_str()?);
            let is_scalar = object.0.getattr("shape")?.len()? == 0;
            if is_flag && is_scalar { object.0.is_truthy().map(Some) } else { Ok(None) }
        };
        match read() {
            Ok(Some(flag)) => Ok(flag),
            Err(error) if ends_call(object.0.py(), &error) => Err(error),
            _ => Err(wrong_argument(name, "a bool", object.0)),
        }
    }

    /// Read a hit, without checking it.
    pub(crate) fn hit(&mut self, hit: HitArg<'_, 'py>) -> PyResult<Option<RequestedHit>> {
        if hit.0.is_none() {
            return Ok(None);
        }
        let _reading = self.reading()?;
        let py = hit.0.py();
        let mut blocks = Vec::new();
        for group in items(
            hit.0.getattr(intern!(py, "blocks"))?.getattr(intern!(py, "groups"))?.as_borrowed(),
        )? {
            let packed = packed_ids(&group).map(Ok);
            blocks.push(packed.unwrap_or_else(|| self.blocks(BlocksArg(group.as_borrowed())))?);
        }
        let num_tokens =
            self.count(CountArg(hit.0.getattr(intern!(py, "num_tokens"))?.as_borrowed()))?;
        Ok(Some(RequestedHit { blocks, num_tokens }))
    }

    /// Read an integer, or return the stand-in of one that is too big; None for anything else, as
    /// `read_int` in kvcore/types/arguments.py.
    fn integer(&mut self, value: Borrowed<'_, 'py, PyAny>) -> PyResult<Option<i64>> {
        let py = value.py();
        let own = !value.is_exact_instance_of::<PyInt>(); // code, that of its `__index__`
        let _reading = if own { self.reading()? } else { None };
        let (negative, object) = match value.extract::<i64>() {
            Ok(number) if number.unsigned_abs() < FAR.unsigned_abs() / 2 => {
                return Ok(Some(number));
            }
            Ok(number) => (number < 0, number.into_pyobject(py)?.into_any()),
            Err(error) if !error.is_instance_of::<PyOverflowError>(py) => {
                return excused(py, error);
            }
            Err(_) => match value.call_method0("__index__") {
                Ok(object) => (object.lt(0)?, object),
                Err(error) => return excused(py, error),
            },
        };
        Ok(Some(self.stand_in(negative, object)))
    }

    fn stand_in(&mut self, negative: bool, object: Bound<'py, PyAny>) -> i64 {
        let far = FAR + APART * self.numbers.len().min(MAX_APART) as i64;
        let stand_in = if negative { -far } else { far };
        self.numbers.push((stand_in, object));
        stand_in
    }
}

/// Ignore an error that an argument raised while it was read, but not one that ends the call.
pub(crate) fn excused<T>(py: Python<'_>, error: PyErr) -> PyResult<Option<T>> {
    if ends_call(py, &error) { Err(error) } else { Ok(None) }
}

/// The items of a list or tuple; None for anything else.
pub(crate) fn listed<'py>(object: Borrowed<'_, 'py, PyAny>) -> Option<Bound<'py, PyTuple>> {
    if let Ok(list) = object.cast::<PyList>() {
        return Some(list.to_tuple());
    }
    object.cast::<PyTuple>().ok().map(|tuple| tuple.to_owned())
}

/// The same items as owned references; a single one needs no allocation.
pub(crate) fn held<'py>(
    object: Borrowed<'_, 'py, PyAny>,
) -> Option<SmallVec<[Bound<'py, PyAny>; 4]>> {
    if let Ok(list) = object.cast::<PyList>() {
        return Some(list.iter().collect());
    }
    Some(object.cast::<PyTuple>().ok()?.iter().collect())
}

/// The items of any iterable.
pub(crate) fn items<'py>(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
    match listed(object) {
        Some(items) => Ok(items),
        None => Ok(object.py().get_type::<PyTuple>().call1((object,))?.cast_into()?),
    }
}

/// A configuration; `kvcore.Config` has checked it.
pub(crate) fn config(object: ConfigArg<'_, '_>) -> PyResult<Config> {
    let object = object.0;
    let number = |name: &str| object.getattr(name)?.extract::<u32>();
    let truth = |name: &str| object.getattr(name)?.is_truthy();
    let mut groups = Vec::new();
    for each in items(object.getattr("groups")?.as_borrowed())? {
        groups.push(group(each.as_borrowed())?);
    }
    let mut floors = Vec::new();
    let given = object.getattr("floors")?;
    for salt in object.getattr("tenants")?.try_iter()? {
        let salt = salt?;
        floors.push((salt.extract()?, given.get_item(salt)?.extract()?));
    }
    Ok(Config {
        num_blocks: number("num_blocks")?,
        groups,
        num_host_blocks: number("num_host_blocks")?,
        max_model_len: object.getattr("max_model_len")?.extract()?,
        max_num_batched_tokens: object.getattr("max_num_batched_tokens")?.extract()?,
        enable_caching: truth("enable_caching")?,
        null_block: truth("null_block")?,
        eviction: eviction(object.getattr("eviction")?.as_borrowed())?,
        duplicates: duplicates(object.getattr("duplicates")?.as_borrowed())?,
        num_preallocate_tokens: number("num_preallocate_tokens")?,
        watermark_blocks: number("watermark_blocks")?,
        use_eagle: truth("use_eagle")?,
        enable_events: truth("enable_events")?,
        record_new_blocks: truth("record_new_blocks")?,
        hashing: hashing(object.py(), object.getattr("hashing")?.extract()?)?,
        hash_seed: object.getattr("hash_seed")?.extract()?,
        max_in_flight: number("max_in_flight")?,
        publish: publish(object.getattr("publish")?.as_borrowed())?,
        hide_salts: truth("hide_salts")?,
        epoch: number("epoch")?,
        max_pinned_blocks: object.getattr("max_pinned_blocks")?.extract()?,
        floors,
        hash_unit: object.getattr("hash_unit")?.extract()?,
    })
}

/// Which freed block leaves first.
pub(crate) fn eviction(name: Borrowed<'_, '_, PyAny>) -> PyResult<Eviction> {
    let known = name.extract().ok().and_then(Eviction::of_name);
    known.ok_or_else(|| wrong_config("eviction", name, "is no policy of the compiled twin"))
}

/// The pieces of a retention config, which were checked when it was made.
pub(crate) fn pieces(retention: RetentionArg<'_, '_>) -> PyResult<Vec<Piece>> {
    let piece = |piece: Bound<'_, PyAny>| {
        type Parts = (u32, Option<u32>, (u8, u8, u64));
        let (first, end, (base, level, duration)) = piece.extract::<Parts>()?;
        Ok((first, end, Wish { base, level, duration }))
    };
    let pieces = retention.0.getattr(intern!(retention.0.py(), "pieces"))?;
    items(pieces.as_borrowed())?.iter().map(piece).collect()
}

/// Eviction policy of a pool, by its name.
pub(crate) fn pool_eviction(name: Borrowed<'_, '_, PyAny>) -> PyResult<PoolEviction> {
    match name.extract() {
        Ok("priority") => Ok(PoolEviction::Priority),
        _ => eviction(name).map(Eviction::of_host).map(PoolEviction::Of),
    }
}

/// Where a block lives.
pub(crate) fn tier(name: TierArg<'_, '_>) -> PyResult<Tier> {
    match name.0.extract() {
        Ok("device") => Ok(Tier::Device),
        Ok("host") => Ok(Tier::Host),
        _ => Err(wrong_argument("tier", "'device' or 'host'", name.0)),
    }
}

/// When a block was used.
pub(crate) fn time(time: NumberArg<'_, '_>) -> PyResult<Option<f64>> {
    match time.0.extract() {
        Ok(Some(number)) if !f64::is_finite(number) => {
            Err(wrong_argument("time", "a finite number", time.0))
        }
        Ok(read) => Ok(read),
        Err(_) => Err(wrong_argument("time", "a finite number", time.0)),
    }
}

/// How many tokens a chain has.
pub(crate) fn length(length: NumberArg<'_, '_>) -> PyResult<Option<u32>> {
    match length.0.extract::<Option<u32>>() {
        Ok(read) if read.is_none_or(|number| number <= NO_LIMIT) => Ok(read),
        _ => {
            let expected = format!("an integer from 0 to {NO_LIMIT}");
            Err(wrong_argument("length", &expected, length.0))
        }
    }
}

/// Block hashes, of whatever form.
pub(crate) fn hashes(hashes: HashesArg<'_, '_>) -> PyResult<GivenHashes> {
    let hash = |item: Borrowed<'_, '_, PyAny>| {
        item.cast::<PyBytes>().ok().and_then(|bytes| bytes.as_bytes().try_into().ok())
    };
    Ok(items(hashes.0)?.iter_borrowed().map(hash).collect())
}

fn group(object: Borrowed<'_, '_, PyAny>) -> PyResult<Group> {
    let name = object.getattr("kind")?;
    let kind = name
        .extract()
        .ok()
        .and_then(|kind: &str| KINDS.into_iter().find(|each| each.name() == kind));
    let Some(kind) = kind else {
        let names: Vec<&str> = KINDS.iter().map(|kind| kind.name()).collect();
        let reason = format!("must be one of {}", names.join(", "));
        return Err(wrong_config("kind", name.as_borrowed(), &reason));
    };
    Ok(Group {
        block_size: object.getattr("block_size")?.extract()?,
        kind,
        window: object.getattr("window")?.extract()?,
        eagle: object.getattr("eagle")?.is_truthy()?,
        zero_new_blocks: object.getattr("zero_new_blocks")?.is_truthy()?,
        page_bytes: object.getattr("page_bytes")?.extract()?,
        draft_states: object.getattr("draft_states")?.extract()?,
    })
}

fn duplicates(name: Borrowed<'_, '_, PyAny>) -> PyResult<Duplicates> {
    match name.extract() {
        Ok("keep") => Ok(Duplicates::Keep),
        Ok("merge") => Ok(Duplicates::Merge),
        _ => Err(wrong_config("duplicates", name, "must be one of keep, merge")),
    }
}

fn publish(name: Borrowed<'_, '_, PyAny>) -> PyResult<Publish> {
    match name.extract() {
        Ok("scheduled") => Ok(Publish::Scheduled),
        Ok("completed") => Ok(Publish::Completed),
        _ => Err(wrong_config("publish", name, "must be one of scheduled, completed")),
    }
}

/// A hashing by its name. Raises InvalidConfig.
pub(crate) fn hashing(py: Python<'_>, name: &str) -> PyResult<Hashing> {
    Hashing::named(name).ok_or_else(|| {
        let reason = "must be one of sha256, sha256_cbor, xxh3, siphash".to_owned();
        raise(py, Error::InvalidConfig { field: "hashing", value: name.into(), reason })
    })
}
