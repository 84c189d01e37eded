// SPDX-License-Identifier: Apache-2.0
//! The twin's errors as Python's: the class of the same name with the same fields.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::bindings::arguments::Given;
use crate::bindings::classes::Classes;
use crate::legacy::blocks::tiers::Misuse;
use crate::types::commands::Tier;
use crate::types::errors::{Error, Field, repr};

/// What ends a call: an error of the twin, or one that an argument raised while it was read.
pub(crate) enum Wrong {
    /// Of the twin.
    Twin(Error),
    /// Of Python.
    Python(PyErr),
}

impl From<Error> for Wrong {
    fn from(error: Error) -> Self {
        Wrong::Twin(error)
    }
}

impl From<PyErr> for Wrong {
    fn from(error: PyErr) -> Self {
        Wrong::Python(error)
    }
}

impl Wrong {
    /// The exception; what stood in for an argument is replaced by the argument.
    pub(crate) fn raise<'py>(self, py: Python<'py>, given: &Given<'py>) -> PyErr {
        match self {
            Wrong::Twin(error) => fields(py, &error, given)
                .and_then(|fields| exception(py, &error, &fields))
                .unwrap_or_else(|broken| broken),
            Wrong::Python(error) => error,
        }
    }
}

/// The exception for an error of which every field has a machine form.
pub(crate) fn raise(py: Python<'_>, error: Error) -> PyErr {
    Wrong::Twin(error).raise(py, &Given::default())
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
    let make = || {
        let py = value.py();
        let fields = PyDict::new(py);
        fields.set_item("name", name)?;
        fields.set_item("expected", expected)?;
        fields.set_item("value", value.repr()?)?;
        let class = Classes::get(py)?.errors.bind(py).getattr("WrongArgument")?;
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
        Field::Text(text) => match given.unnamed() {
            Some(object) if *text == repr("") => Ok(object.repr()?.into_any()),
            _ => Ok(PyString::new(py, text).into_any()),
        },
        Field::Ints(numbers) => numbers.into_pyobject(py),
        Field::Texts(texts) => texts.into_pyobject(py),
    }
}
