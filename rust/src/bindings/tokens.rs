// SPDX-License-Identifier: Apache-2.0
//! Reads tokens passed by an engine: lists, or buffers of integers.
//!
//! A buffer's item format decides how it is read (bytes are one token each); nothing is guessed. A
//! contiguous buffer of native integers is copied at once; any other goes through
//! `memoryview.tobytes`. The format is checked here, since pyo3 mistakes big-endian formats for
//! native ones. An id below 0, which a request with hashes of its own may have, is kept as its 32
//! bits without a sign: -1 as 2**32 - 1. Twin: kvcore/types/tokens.py.

use std::ffi::CStr;

use pyo3::buffer::{Element, PyUntypedBuffer};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyBytes, PyDict, PyFrozenSet, PyInt, PyIterator, PyMemoryView, PySet, PyString, PyTuple,
};

use crate::bindings::arguments::{TokensArg, excused, items, listed};
use crate::bindings::errors::{Given, ends_call, raise, wrong_argument, wrong_row, wrong_token};
use crate::bindings::lists::{Tokens, collected, exact_ids};
use crate::record::fields::ReadTokens;
use crate::types::errors::Error;

/// An argument that is read here: its name, and what it must be.
pub(crate) struct Argument(&'static str, &'static str);

/// Tokens.
pub(crate) const TOKENS: Argument = Argument("tokens", "a list or a buffer of integers");
const ROWS: Argument = Argument("requests", "a list of ids or a buffer of rows");

/// Return the token ids of a list, tuple or buffer.
///
/// Buffers: anything with the buffer protocol, or with a `numpy()` method (torch on the CPU). Fails
/// with InvalidToken for a value outside [0, 2**32), UnsupportedBuffer for another shape or format,
/// WrongArgument for what is neither.
pub(crate) fn read_tokens(tokens: TokensArg<'_, '_>, argument: &Argument) -> PyResult<Tokens> {
    read_signed(&Given::default(), tokens, argument).taken(|| false)
}

/// Do the same for requests that may have ids from -2**31 on.
pub(crate) fn read_signed<'py>(
    given: &Given<'py>,
    tokens: TokensArg<'_, 'py>,
    argument: &Argument,
) -> Signed {
    let mut unsigned = None;
    let tokens = match exact_ids(tokens.0) {
        Some(ids) => Ok(ids),
        None => {
            let read = |_reading| read_any(tokens, argument, &mut unsigned, None);
            given.reading().and_then(read)
        }
    };
    Signed { tokens, unsigned }
}

/// Tokens that were read where ids below 0 are allowed, and the first InvalidToken where they are
/// not.
pub(crate) struct Signed {
    tokens: PyResult<Tokens>,
    unsigned: Option<PyErr>,
}

impl Signed {
    /// The tokens, if all are allowed. allowed: whether ids below 0 are.
    pub(crate) fn taken(self, allowed: impl FnOnce() -> bool) -> PyResult<Tokens> {
        match self.unsigned {
            Some(error) if !allowed() => Err(error),
            _ => self.tokens,
        }
    }

    /// The tokens as they were read, and whether ids below 0 are among them.
    pub(crate) fn shown(&self) -> ReadTokens<'_> {
        Some((self.tokens.as_ref().ok()?, self.unsigned.is_some()))
    }

    /// The number of tokens; 0 if they cannot be read.
    pub(crate) fn len(&self) -> usize {
        self.tokens.as_ref().map_or(0, Tokens::len)
    }
}

/// Read tokens from any object. unsigned: receives the first InvalidToken where ids below 0 are not
/// allowed. ids: receives the items of an iterable that contains a str; there are no tokens then.
fn read_any<'py>(
    tokens: TokensArg<'_, 'py>,
    argument: &Argument,
    unsigned: &mut Option<PyErr>,
    ids: Option<&mut Option<Bound<'py, PyTuple>>>,
) -> PyResult<Tokens> {
    let tokens = tokens.0;
    let py = tokens.py();
    if let Some(ids) = exact_ids(tokens) {
        return Ok(ids);
    }
    if let Some(items) = listed(tokens) {
        return read_items(&items, unsigned);
    }
    if let Ok(buffer) = PyUntypedBuffer::get(&tokens) {
        return match read_native(py, &buffer, unsigned)? {
            Some(values) => Ok(values),
            None => read_view(&PyMemoryView::from(&tokens)?, argument, unsigned),
        };
    }
    if let Some(method) = tokens.getattr_opt(intern!(py, "numpy"))? {
        let read = method.call0().map_err(|error| refused(error, argument, tokens))?;
        return read_any(TokensArg(read.as_borrowed()), argument, unsigned, None);
    }
    match PyMemoryView::from(&tokens) {
        Ok(view) => read_view(&view, argument, unsigned),
        Err(error) if !error.is_instance_of::<PyTypeError>(py) => {
            Err(refused(error, argument, tokens))
        }
        Err(_) if is_iterable(tokens)? => {
            let items = items(tokens)?;
            let are_ids = items.iter_borrowed().any(|item| item.is_instance_of::<PyString>());
            match ids {
                Some(ids) if are_ids => {
                    *ids = Some(items);
                    Ok(Tokens::new())
                }
                _ => read_items(&items, unsigned),
            }
        }
        Err(_) => Err(wrong_argument(argument.0, argument.1, tokens)),
    }
}

/// Convert the error of an argument that cannot be read, such as a tensor that is not on the CPU or
/// whose dtype numpy lacks. An error that ends the call is passed on.
fn refused(error: PyErr, argument: &Argument, tokens: Borrowed<'_, '_, PyAny>) -> PyErr {
    let py = tokens.py();
    if ends_call(py, &error) {
        return error;
    }
    let wrong = wrong_argument(argument.0, argument.1, tokens);
    wrong.set_cause(py, Some(error));
    wrong
}

/// Read an iterator, which may call the manager, into a deque; return any other value as it is.
pub(crate) fn read_once<'py>(values: TokensArg<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    let py = values.0.py();
    let is_iterator = values.0.cast::<PyIterator>().is_ok();
    if !is_iterator || !values.0.hasattr(intern!(py, "__iter__"))? {
        return Ok(values.0.to_owned());
    }
    py.import("collections")?.getattr("deque")?.call1((values.0,))
}

/// The requests that a call names.
pub(crate) enum Named<'py> {
    /// By their rows: a buffer, or an iterable of integers that is not a list or tuple.
    Rows(Tokens),
    /// By their ids: another iterable that contains one.
    Ids(Bound<'py, PyTuple>),
}

/// The requests that anything but a list or tuple names. Fails as `read_tokens` does, and with
/// UnknownRequest for what is no row.
pub(crate) fn read_named<'py>(
    given: &Given<'py>,
    requests: TokensArg<'_, 'py>,
) -> PyResult<Named<'py>> {
    if let Some(rows) = exact_ids(requests.0) {
        return Ok(Named::Rows(rows));
    }
    let (py, _reading) = (requests.0.py(), given.reading()?);
    let (mut ids, mut unsigned) = (None, None);
    let tokens = read_any(requests, &ROWS, &mut unsigned, Some(&mut ids));
    let rows = Signed { tokens, unsigned }.taken(|| false).map_err(|wrong| {
        let item = || {
            let fields = wrong.value(py).getattr("fields")?;
            fields.get_item("position")?;
            fields.get_item("value")
        };
        match item() {
            Ok(value) => wrong_row(&value),
            Err(_) => wrong,
        }
    })?;
    Ok(ids.map_or(Named::Rows(rows), Named::Ids))
}

/// The values of a row of native integers; None for any other buffer.
fn read_native(
    py: Python<'_>,
    buffer: &PyUntypedBuffer,
    unsigned: &mut Option<PyErr>,
) -> PyResult<Option<Tokens>> {
    let Some(signed) = Format::read(buffer.format()).map(|format| format.signed) else {
        return Ok(None);
    };
    if buffer.dimensions() != 1 {
        return Ok(None);
    }
    match (signed, buffer.item_size()) {
        (false, 1) => copy::<u8>(py, buffer, unsigned),
        (false, 2) => copy::<u16>(py, buffer, unsigned),
        (false, 4) => copy::<u32>(py, buffer, unsigned),
        (false, _) => copy::<u64>(py, buffer, unsigned),
        (true, 1) => copy::<i8>(py, buffer, unsigned),
        (true, 2) => copy::<i16>(py, buffer, unsigned),
        (true, 4) => copy::<i32>(py, buffer, unsigned),
        (true, _) => copy::<i64>(py, buffer, unsigned),
    }
}

/// Copy the items; None if they are not of this type, or not aligned.
fn copy<T>(
    py: Python<'_>,
    buffer: &PyUntypedBuffer,
    unsigned: &mut Option<PyErr>,
) -> PyResult<Option<Tokens>>
where
    T: Element + Into<i128>,
    u32: TryFrom<T>,
{
    match buffer.as_typed::<T>() {
        Ok(values) => narrow(py, values.to_vec(py)?.iter().copied(), unsigned).map(Some),
        Err(_) => Ok(None),
    }
}

/// The values of any buffer that is a row of integers.
fn read_view(
    view: &Bound<'_, PyMemoryView>,
    argument: &Argument,
    unsigned: &mut Option<PyErr>,
) -> PyResult<Tokens> {
    let py = view.py();
    let shown: String = view.getattr("format")?.extract()?;
    let dimensions = view.getattr("ndim")?.extract()?;
    let format = Format::parse(shown.as_bytes());
    let (Some(Format { little, signed }), 1) = (format, dimensions) else {
        let error = Error::UnsupportedBuffer { name: argument.0, format: shown, dimensions };
        return Err(raise(py, error));
    };
    let bytes = view.call_method0("tobytes")?;
    let bytes = bytes.cast::<PyBytes>()?.as_bytes();
    macro_rules! parse {
        ($kind:ty) => {{
            let read = if little { <$kind>::from_le_bytes } else { <$kind>::from_ne_bytes };
            let (items, _) = bytes.as_chunks();
            narrow(py, items.iter().map(|item| read(*item)), unsigned)
        }};
    }
    match (signed, view.getattr("itemsize")?.extract()?) {
        (false, 1_usize) => parse!(u8),
        (false, 2) => parse!(u16),
        (false, 4) => parse!(u32),
        (false, _) => parse!(u64),
        (true, 1) => parse!(i8),
        (true, 2) => parse!(i16),
        (true, 4) => parse!(i32),
        (true, _) => parse!(i64),
    }
}

/// Convert the values to u32, in passes that the compiler vectorises.
fn narrow<T>(
    py: Python<'_>,
    values: impl ExactSizeIterator<Item = T> + Clone,
    unsigned: &mut Option<PyErr>,
) -> PyResult<Tokens>
where
    T: Copy + Into<i128>,
    u32: TryFrom<T>,
{
    let fits = |value: T| u32::try_from(value).is_ok();
    if !values.clone().fold(true, |all, value| all & fits(value)) {
        let mut column = Tokens::new();
        for (position, value) in values.map(Into::<i128>::into).enumerate() {
            let wrong = |least| wrong_token(PyInt::new(py, value).as_any(), position, least);
            column.push(id_of(value, unsigned, wrong)?);
        }
        return Ok(column);
    }
    Ok(collected(values.map(|value| u32::try_from(value).unwrap_or_default())))
}

/// Convert a value to an id. If it is below 0, return its bits. unsigned: as in `read_any`. wrong:
/// makes InvalidToken where this is the least id.
fn id_of(value: i128, unsigned: &mut Option<PyErr>, wrong: impl Fn(i32) -> PyErr) -> PyResult<u32> {
    if let Ok(id) = u32::try_from(value) {
        return Ok(id);
    }
    unsigned.get_or_insert_with(|| wrong(0));
    i32::try_from(value).map(i32::cast_unsigned).map_err(|_| wrong(i32::MIN))
}

fn read_items(items: &Bound<'_, PyTuple>, unsigned: &mut Option<PyErr>) -> PyResult<Tokens> {
    let mut values = Tokens::with_capacity(items.len());
    for (position, item) in items.iter_borrowed().enumerate() {
        let py = item.py();
        let read = || item.extract::<i64>().map(Some).or_else(|error| excused(py, error));
        let value = if is_integer(item) { read()?.unwrap_or(i64::MAX) } else { i64::MAX };
        let wrong = |least| wrong_token(&item, position, least);
        values.push(id_of(value.into(), unsigned, wrong)?);
    }
    Ok(values)
}

/// How the items of a buffer are to be read, except their size.
struct Format {
    little: bool,
    signed: bool,
}

impl Format {
    fn read(format: &CStr) -> Option<Format> {
        Format::parse(format.to_bytes())
    }

    /// Parse a format; None unless it is an integer in a supported byte order.
    fn parse(format: &[u8]) -> Option<Format> {
        let (order, code) = match *format {
            [code] => (b'@', code),
            [order, code] => (order, code),
            _ => return None,
        };
        let known = b"@=<".contains(&order) && b"bBhHiIlLqQ".contains(&code);
        known.then_some(Format { little: order == b'<', signed: code.is_ascii_lowercase() })
    }
}

/// Whether an object is a Python int or converts to one, and is not a bool.
fn is_integer(object: Borrowed<'_, '_, PyAny>) -> bool {
    let py = object.py();
    object.is_exact_instance_of::<PyInt>()
        || (object.hasattr(intern!(py, "__index__")).unwrap_or(false)
            && !object.is_instance_of::<PyBool>())
}

fn is_iterable(object: Borrowed<'_, '_, PyAny>) -> PyResult<bool> {
    let without_order = object.is_instance_of::<PySet>()
        || object.is_instance_of::<PyFrozenSet>()
        || object.is_instance_of::<PyDict>();
    let iterable = object.hasattr("__iter__")? && !object.is_instance_of::<PyString>();
    Ok(iterable && !without_order)
}
