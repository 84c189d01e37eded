// SPDX-License-Identifier: Apache-2.0
//! The twin's errors as Python's: the class of the same name with the same fields.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::bindings::classes::Classes;
use crate::legacy::blocks::tiers::Misuse;
use crate::types::commands::Tier;
use crate::types::errors::{Error, Field};

/// Stand-ins of one call are so far apart, and what the twin adds to them is less than half of it.
pub(crate) const APART: i64 = 1 << 40;

/// What a call was given that has no machine form.
#[derive(Default)]
pub(crate) struct Given<'py> {
    /// The first id that is no name; "" stands in for it.
    pub(crate) unnamed: Option<Bound<'py, PyAny>>,
    /// Stand-ins and what they stand for.
    pub(crate) numbers: Vec<(i64, Bound<'py, PyAny>)>,
}

impl<'py> Given<'py> {
    /// The first id that is no name.
    pub(crate) fn unnamed(&self) -> Option<&Bound<'py, PyAny>> {
        self.unnamed.as_ref()
    }

    /// What a number of an error stands for, if it is a stand-in or was computed from one.
    pub(crate) fn number(&self, number: i64) -> PyResult<Option<Bound<'py, PyAny>>> {
        let near =
            |(stand_in, _): &&(i64, _)| number.abs_diff(*stand_in) < APART.unsigned_abs() / 2;
        match self.numbers.iter().find(near) {
            None => Ok(None),
            Some((stand_in, object)) if number == *stand_in => Ok(Some(object.clone())),
            Some((stand_in, object)) => object.add(number - stand_in).map(Some),
        }
    }
}

/// What ends a call: an error of the twin, or one that an argument raised while it was read.
pub(crate) enum CallError {
    /// Of the twin.
    Twin(Error),
    /// Of Python.
    Python(PyErr),
}

impl From<Error> for CallError {
    fn from(error: Error) -> Self {
        CallError::Twin(error)
    }
}

impl From<PyErr> for CallError {
    fn from(error: PyErr) -> Self {
        CallError::Python(error)
    }
}

impl CallError {
    /// The exception; what stood in for an argument is replaced by the argument.
    pub(crate) fn raise<'py>(self, py: Python<'py>, given: &Given<'py>) -> PyErr {
        match self {
            CallError::Twin(error) => fields(py, &error, given)
                .and_then(|fields| exception(py, &error, &fields))
                .unwrap_or_else(|broken| broken),
            CallError::Python(error) => error,
        }
    }
}

/// The exception for an error of which every field has a machine form.
pub(crate) fn raise(py: Python<'_>, error: Error) -> PyErr {
    CallError::Twin(error).raise(py, &Given::default())
}

/// The exception for misuse of a tier's blocks; what names a block of the host says so.
pub(crate) fn raise_in<'py>(py: Python<'py>, misuse: Misuse, given: &Given<'py>) -> PyErr {
    let make = || {
        let fields = fields(py, &misuse.error, given)?;
        if misuse.tier == Tier::Host && fields.contains("block")? {
            fields.set_item("tier", "host")?;
        }
        exception(py, &misuse.error, &fields)
    };
    make().unwrap_or_else(|broken| broken)
}

/// The exception for an argument that is of no kind that a call takes.
pub(crate) fn wrong_argument(name: &str, expected: &str, value: Borrowed<'_, '_, PyAny>) -> PyErr {
    misuse(value.py(), "WrongArgument", |fields| {
        fields.set_item("name", name)?;
        fields.set_item("expected", expected)?;
        fields.set_item("value", value)
    })
}

/// The exception for a field of a configuration that is none of those there are.
pub(crate) fn wrong_config(name: &str, value: Borrowed<'_, '_, PyAny>, reason: &str) -> PyErr {
    misuse(value.py(), "InvalidConfig", |fields| {
        fields.set_item("field", name)?;
        fields.set_item("value", value)?;
        fields.set_item("reason", reason)
    })
}

/// The exception for an item that is no token.
pub(crate) fn wrong_token(value: &Bound<'_, PyAny>, position: usize) -> PyErr {
    misuse(value.py(), "InvalidToken", |fields| {
        fields.set_item("value", value)?;
        fields.set_item("position", position)
    })
}

/// The exception for an item that is no row of a request.
pub(crate) fn wrong_row(row: &Bound<'_, PyAny>) -> PyErr {
    misuse(row.py(), "UnknownRow", |fields| fields.set_item("row", row))
}

/// The exception of this class with these fields, which are objects of Python.
fn misuse(
    py: Python<'_>,
    name: &str,
    fill: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<()>,
) -> PyErr {
    let make = || {
        let fields = PyDict::new(py);
        fill(&fields)?;
        let class = Classes::get(py)?.errors.bind(py).getattr(name)?;
        Ok(PyErr::from_value(class.call((), Some(&fields))?))
    };
    make().unwrap_or_else(|broken| broken)
}

fn exception(py: Python<'_>, error: &Error, fields: &Bound<'_, PyDict>) -> PyResult<PyErr> {
    let class = Classes::get(py)?.errors.bind(py).getattr(error.name())?;
    Ok(PyErr::from_value(class.call((), Some(fields))?))
}

fn fields<'py>(py: Python<'py>, error: &Error, given: &Given<'py>) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    for (name, field) in error.fields() {
        fields.set_item(name, value(py, &field, given)?)?;
    }
    Ok(fields)
}

fn value<'py>(py: Python<'py>, field: &Field, given: &Given<'py>) -> PyResult<Bound<'py, PyAny>> {
    match field {
        Field::Int(number) => match given.number(*number)? {
            Some(object) => Ok(object),
            None => Ok(number.into_pyobject(py)?.into_any()),
        },
        Field::Missing => Ok(py.None().into_bound(py)),
        Field::Long(number) => Ok(number.into_pyobject(py)?.into_any()),
        Field::Text(text) => match given.unnamed() {
            Some(object) if text.is_empty() => Ok(object.clone()),
            _ => Ok(PyString::new(py, text).into_any()),
        },
        Field::Bytes(bytes) => Ok(PyBytes::new(py, bytes).into_any()),
        Field::Ints(numbers) => numbers.into_pyobject(py),
        Field::Texts(texts) => texts.into_pyobject(py),
    }
}
