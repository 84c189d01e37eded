// SPDX-License-Identifier: Apache-2.0
//! Converts the twin's errors to Python: the class of the same name with the same fields.

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyString};

use crate::bindings::classes::Classes;
use crate::legacy::blocks::tiers::Misuse;
use crate::types::commands::Tier;
use crate::types::errors::{Error, Field};

/// The distance between the stand-ins of one call; the twin adds less than half of it to one.
pub(crate) const APART: i64 = 1 << 40;

/// What a call changes, lent to be read as long as this lives.
pub(crate) trait Lent {}

/// Lend an object. Raises ConcurrentCall.
pub(crate) type Lend = for<'py> fn(&Bound<'py, PyAny>) -> PyResult<Box<dyn Lent + 'py>>;

/// The arguments of a call that have no machine form.
#[derive(Default)]
pub(crate) struct Given<'py> {
    /// What the call changes, and how it is lent.
    pub(crate) changed: Option<(Bound<'py, PyAny>, Lend)>,
    /// The first id that is not a name; "" stands in for it.
    pub(crate) unnamed: Option<Bound<'py, PyAny>>,
    /// Stand-ins and their arguments.
    pub(crate) numbers: Vec<(i64, Bound<'py, PyAny>)>,
}

impl<'py> Given<'py> {
    /// Lend what the call changes while an argument runs code of its own, which may query it but
    /// not change it. Raises ConcurrentCall.
    pub(crate) fn reading(&self) -> PyResult<Option<Box<dyn Lent + 'py>>> {
        self.changed.as_ref().map(|(changed, lend)| lend(changed)).transpose()
    }

    /// The first id that is not a name.
    pub(crate) fn unnamed(&self) -> Option<&Bound<'py, PyAny>> {
        self.unnamed.as_ref()
    }

    /// The argument that a number of an error stands for, if it is a stand-in or derived from one.
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

/// An error that ends a call: the twin's, or one that an argument raised while it was read.
pub(crate) enum CallError {
    /// An error of the twin.
    Twin(Error),
    /// An error of Python.
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
    /// Make the exception; stand-ins are replaced by their arguments.
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

/// Make the exception for misuse of a tier's blocks; that of a host block names the tier.
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

/// Make the exception for an argument of a kind that the call does not take.
pub(crate) fn wrong_argument(name: &str, expected: &str, value: Borrowed<'_, '_, PyAny>) -> PyErr {
    misuse(value.py(), "WrongArgument", |fields| {
        fields.set_item("name", name)?;
        fields.set_item("expected", expected)?;
        fields.set_item("value", value)
    })
}

/// Make the exception for an invalid field of a configuration.
pub(crate) fn wrong_config(name: &str, value: Borrowed<'_, '_, PyAny>, reason: &str) -> PyErr {
    misuse(value.py(), "InvalidConfig", |fields| {
        fields.set_item("field", name)?;
        fields.set_item("value", value)?;
        fields.set_item("reason", reason)
    })
}

/// Make the exception for an item that is not a token, where tokens are at least `least`.
pub(crate) fn wrong_token(value: &Bound<'_, PyAny>, position: usize, least: i32) -> PyErr {
    misuse(value.py(), "InvalidToken", |fields| {
        fields.set_item("value", value)?;
        fields.set_item("position", position)?;
        fields.set_item("least", least)
    })
}

/// Make the exception for an item that is not a request's row.
pub(crate) fn wrong_row(row: &Bound<'_, PyAny>) -> PyErr {
    misuse(row.py(), "UnknownRow", |fields| fields.set_item("row", row))
}

/// Whether an error that an argument raised ends the call: it ends the program, or says that the
/// argument would have changed the manager.
pub(crate) fn ends_call(py: Python<'_>, error: &PyErr) -> bool {
    let class = Classes::get(py).and_then(|each| each.errors.bind(py).getattr("ConcurrentCall"));
    !error.is_instance_of::<PyException>(py)
        || class.is_ok_and(|class| error.value(py).is_instance(&class).unwrap_or(false))
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
        Field::Flag(flag) => Ok(PyBool::new(py, *flag).to_owned().into_any()),
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
