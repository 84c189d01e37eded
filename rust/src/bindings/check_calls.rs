// SPDX-License-Identifier: Apache-2.0
//! Converts the calls of a story to Python: names with the arguments that transitions take.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

use crate::bindings::arguments::items;
use crate::bindings::values::hit;
use crate::check::world::calls::slot_request;
use crate::oracle::calls::{Call, Name, Slots};
use crate::types::keys::BlockHash;
use crate::types::slot_request::SlotOption;
use crate::types::values::Hit;

/// Makes the Python calls of one world.
pub(crate) struct Stories<'py> {
    py: Python<'py>,
    request: Bound<'py, PyAny>,
    kinds: Bound<'py, PyTuple>,
}

type Arguments<'py> = Vec<Bound<'py, PyAny>>;

impl<'py> Stories<'py> {
    /// Prepare for the calls of a world.
    pub(crate) fn new(world: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = world.py();
        let request = py.import("kvcore.types.values")?.getattr("Request")?;
        let kinds = items(world.getattr("kinds_of_requests")?.as_borrowed())?;
        Ok(Stories { py, request, kinds })
    }

    /// A call as its name, arguments and options.
    pub(crate) fn call(&self, call: &Call) -> PyResult<Bound<'py, PyTuple>> {
        let options = PyDict::new(self.py);
        let arguments = self.arguments(call, &options)?;
        let name = PyString::new(self.py, call.transition()).into_any();
        let arguments = PyTuple::new(self.py, arguments)?.into_any();
        PyTuple::new(self.py, [name, arguments, options.into_any()])
    }

    fn arguments(&self, call: &Call, options: &Bound<'py, PyDict>) -> PyResult<Arguments<'py>> {
        Ok(match call {
            Call::AddRequest { name, tokens, kind } => {
                let brought = PyDict::new(self.py);
                brought.update(self.kinds.get_item(*kind)?.cast()?)?;
                vec![self.request.call((name.id(), tokens.clone()), Some(&brought))?]
            }
            Call::AllocateSlots(slots) => self.slots(slots, options)?,
            Call::Append { name, token, batch } => {
                batch.map(|batch| options.set_item("batch", batch)).transpose()?;
                let tokens = token.map(|token| self.list(vec![token])).transpose()?;
                [self.ids(&[*name])?].into_iter().chain(tokens).collect()
            }
            Call::Fork { parent, child } => vec![self.id(*parent), self.id(*child)],
            Call::RemoveRequest { name } | Call::Free { name } => vec![self.id(*name)],
            Call::Truncate { name, num_tokens: count }
            | Call::Unschedule { name, num_tokens: count }
            | Call::Accept { name, num_accepted: count }
            | Call::RemoveSkippedBlocks { name, num_tokens: count }
            | Call::CacheBlocks { name, num_tokens: count } => {
                vec![self.id(*name), self.number(*count)?]
            }
            Call::Rewind { names, num_tokens } => {
                vec![self.ids(names)?, self.number(*num_tokens)?]
            }
            Call::AddTokens { name, tokens, output } => {
                if let Some(output) = output {
                    options.set_item("num_rejected", output.num_rejected)?;
                    options.set_item("batch", output.batch)?;
                }
                vec![self.id(*name), self.list(tokens.clone())?]
            }
            Call::AddBlockHashes { name, hashes } => vec![self.id(*name), self.hashes(hashes)?],
            Call::AddDrafts { name, tokens } => vec![self.id(*name), self.list(tokens.clone())?],
            Call::SwapOut { names } | Call::SwapIn { names } => vec![self.ids(names)?],
            Call::EvictBlocks { block }
            | Call::Pin { block }
            | Call::Unpin { block }
            | Call::Store { block } => vec![self.list(vec![*block])?],
            Call::PinPrefix { pin, name, num_tokens } => {
                let pin = PyString::new(self.py, pin).into_any();
                vec![pin, self.id(*name), self.number(*num_tokens)?]
            }
            Call::UnpinPrefix { pin } => vec![PyString::new(self.py, pin).into_any()],
            Call::Load { name, num_tokens, hit } => {
                let mut all = vec![self.id(*name), self.number(*num_tokens)?];
                all.extend(self.hit(hit.as_ref())?);
                all
            }
            Call::CompleteOperation { operation, done } => {
                let done = pyo3::types::PyBool::new(self.py, *done).to_owned().into_any();
                vec![self.number(*operation)?, done]
            }
            Call::Complete { batch } | Call::Cancel { batch } | Call::Execute { batch } => {
                vec![batch.into_pyobject(self.py)?.into_any()]
            }
            Call::Tick { now } => vec![self.number(*now as u32)?],
            Call::ResetPrefixCache | Call::AdvanceEpoch | Call::TakeBatch => Vec::new(),
        })
    }

    fn slots(&self, slots: &Slots, options: &Bound<'py, PyDict>) -> PyResult<Arguments<'py>> {
        for (name, option) in slot_request(slots).options() {
            match option {
                SlotOption::Count(&mut count) if count > 0 => options.set_item(name, count)?,
                SlotOption::Flag(&mut true) => options.set_item(name, true)?,
                _ => {}
            }
        }
        let mut all = vec![self.id(slots.name), self.number(slots.num_new_tokens)?];
        all.extend(self.hit(slots.hit.as_ref())?);
        Ok(all)
    }

    fn hit(&self, found: Option<&Hit>) -> PyResult<Option<Bound<'py, PyAny>>> {
        found.map(|found| Ok(hit(self.py, found)?.0)).transpose()
    }

    fn id(&self, name: Name) -> Bound<'py, PyAny> {
        PyString::new(self.py, name.id()).into_any()
    }

    fn ids(&self, names: &[Name]) -> PyResult<Bound<'py, PyAny>> {
        let ids: Vec<&str> = names.iter().map(|name| name.id()).collect();
        ids.into_pyobject(self.py)
    }

    fn number(&self, number: u32) -> PyResult<Bound<'py, PyAny>> {
        Ok(number.into_pyobject(self.py)?.into_any())
    }

    fn hashes(&self, hashes: &[BlockHash]) -> PyResult<Bound<'py, PyAny>> {
        let hashes = hashes.iter().map(|hash| PyBytes::new(self.py, hash));
        Ok(PyList::new(self.py, hashes)?.into_any())
    }

    fn list(&self, numbers: Vec<u32>) -> PyResult<Bound<'py, PyAny>> {
        numbers.into_pyobject(self.py)
    }
}
