//! Plain data of extra state, to and from Python.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use weightsync_engine::Plain;

use crate::errors::WrongTypeError;

/// The deepest nesting that is looked into: the library refuses less.
const DEEPEST: usize = 64;

/// The extra state of a name as plain data; anything that is none is refused by
/// its place.
pub fn from_python(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Plain> {
    convert(value, &format!("extra state {name}"), DEEPEST)
}

fn convert(value: &Bound<'_, PyAny>, place: &str, left: usize) -> PyResult<Plain> {
    if left == 0 {
        return Err(WrongTypeError::new_err(format!(
            "{place} is nested too deeply"
        )));
    }
    if value.is_none() {
        return Ok(Plain::Null);
    }
    // `bool` is a kind of `int` in Python, so it comes first.
    if let Ok(value) = value.cast::<PyBool>() {
        return Ok(Plain::Bool(value.is_true()));
    }
    if value.cast::<PyInt>().is_ok() {
        // From -2**63 on as signed, above 2**63 as unsigned.
        if let Ok(value) = value.extract::<i64>() {
            return Ok(Plain::Int(value));
        }
        return value.extract().map(Plain::Unsigned).map_err(|_| {
            WrongTypeError::new_err(format!(
                "{place} is {value}: whole numbers are from -2**63 to 2**64 - 1"
            ))
        });
    }
    if let Ok(value) = value.cast::<PyFloat>() {
        return Ok(Plain::Float(value.value()));
    }
    if let Ok(value) = value.cast::<PyString>() {
        return Ok(Plain::Text(value.to_str()?.to_owned()));
    }
    // A tuple comes back as a list: plain data has one kind of sequence.
    if value.cast::<PyList>().is_ok() || value.cast::<PyTuple>().is_ok() {
        let items = value.try_iter()?.enumerate();
        // The place names the item, so an error in a deep structure can be found.
        let items = items.map(|(at, item)| convert(&item?, &format!("{place}[{at}]"), left - 1));
        return Ok(Plain::List(items.collect::<PyResult<_>>()?));
    }
    if let Ok(map) = value.cast::<PyDict>() {
        let entries = map.iter().map(|(key, value)| {
            // Keys are text only, as in JSON.
            let Ok(key) = key.extract::<String>() else {
                return Err(WrongTypeError::new_err(format!(
                    "{place} has the key {key}, and only text can be one"
                )));
            };
            let value = convert(&value, &format!("{place}[{key:?}]"), left - 1)?;
            Ok((key, value))
        });
        return Ok(Plain::Map(entries.collect::<PyResult<_>>()?));
    }
    Err(WrongTypeError::new_err(format!(
        "{place} is a {}: extra state is tensors, numbers, text, lists and maps",
        value.get_type().name()?
    )))
}

/// Plain data as Python's own values.
pub fn to_python<'py>(py: Python<'py>, value: &Plain) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Plain::Null => py.None().into_bound(py),
        Plain::Bool(value) => PyBool::new(py, *value).to_owned().into_any(),
        Plain::Int(value) => value.into_pyobject(py)?.into_any(),
        Plain::Unsigned(value) => value.into_pyobject(py)?.into_any(),
        Plain::Float(value) => PyFloat::new(py, *value).into_any(),
        Plain::Text(value) => PyString::new(py, value).into_any(),
        Plain::List(values) => {
            let values = values.iter().map(|value| to_python(py, value));
            PyList::new(py, values.collect::<PyResult<Vec<_>>>()?)?.into_any()
        }
        Plain::Map(values) => {
            let map = PyDict::new(py);
            for (key, value) in values {
                map.set_item(key, to_python(py, value)?)?;
            }
            map.into_any()
        }
    })
}
