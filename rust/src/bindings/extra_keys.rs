// SPDX-License-Identifier: Apache-2.0
//! Converts the extra keys of a `Request` to machine types.
//!
//! `kvcore.LoRA`, `MediaItem` and `PromptEmbeds` check themselves when they are made, and the
//! manager has checked that the parts of a request are of these kinds. A salt that is no text is
//! passed on as the empty one, which the twin refuses.

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::bindings::arguments::{RequestArg, RetentionArg, items, pieces};
use crate::bindings::errors::Given;
use crate::check::world::world::KindOfRequest;
use crate::types::extra_inputs::{GivenKeys, LoRA, MediaItem, PromptEmbeds};

/// The parts of a request, kept alive while the twin reads them.
pub(crate) struct Parts<'py> {
    lora: Option<LoRA>,
    media: Vec<MediaItem>,
    cache_salt: Option<Bound<'py, PyAny>>,
    prompt_embeds: Option<(Bound<'py, PyBytes>, u32)>,
}

impl<'py> Parts<'py> {
    /// Read the parts of a `Request`.
    pub(crate) fn read(request: RequestArg<'_, 'py>) -> PyResult<Self> {
        let (request, py) = (request.0, request.0.py());
        let part = |name| -> PyResult<Option<Bound<'py, PyAny>>> {
            Ok(Some(request.getattr(name)?).filter(|part| !part.is_none()))
        };
        let text = |object: &Bound<'py, PyAny>, name| object.getattr(name)?.extract::<String>();
        let size = |object: &Bound<'py, PyAny>, name| object.getattr(name)?.extract::<u32>();
        let lora = part(intern!(py, "lora"))?.map(|lora| {
            Ok::<_, PyErr>(LoRA { name: text(&lora, "name")?, path: text(&lora, "path")? })
        });
        let media = request.getattr(intern!(py, "media"))?;
        let media = items(media.as_borrowed())?.iter().map(|item| {
            let identifier = text(&item, "identifier")?;
            let (offset, length) = (size(&item, "offset")?, size(&item, "length")?);
            Ok(MediaItem { identifier, offset, length })
        });
        let embeds = part(intern!(py, "prompt_embeds"))?.map(|embeds| {
            let data = embeds.getattr("data")?.cast_into::<PyBytes>()?;
            Ok::<_, PyErr>((data, size(&embeds, "bytes_per_token")?))
        });
        Ok(Parts {
            lora: lora.transpose()?,
            media: media.collect::<PyResult<_>>()?,
            cache_salt: part(intern!(py, "cache_salt"))?,
            prompt_embeds: embeds.transpose()?,
        })
    }

    /// The parts as the twin takes them.
    pub(crate) fn keys(&self, given: &mut Given<'py>) -> GivenKeys<'_> {
        let embeds = self.prompt_embeds.as_ref();
        GivenKeys {
            lora: self.lora.clone(),
            media: self.media.clone(),
            cache_salt: self.cache_salt.as_ref().map(|salt| given.name(salt.as_borrowed())),
            prompt_embeds: embeds.map(|(data, bytes_per_token)| PromptEmbeds {
                data: data.as_bytes(),
                bytes_per_token: *bytes_per_token,
            }),
        }
    }
}

/// Read from a mapping of the optional arguments of `Request` what new requests of a world have.
pub(crate) fn kind_of_request(kind: &Bound<'_, PyAny>) -> PyResult<KindOfRequest> {
    let py = kind.py();
    let said = PyDict::new(py);
    said.set_item("media", PyTuple::empty(py))?;
    for name in ["lora", "cache_salt", "prompt_embeds", "skip_reading_prefix_cache", "retention"] {
        said.set_item(name, py.None())?;
    }
    said.set_item("block_hashes", py.None())?;
    for name in kind.call_method0("keys")?.try_iter()? {
        let name = name?;
        if !said.contains(&name)? {
            let detail = format!("a world of both languages has no {name} of requests");
            return Err(PyValueError::new_err(detail));
        }
        said.set_item(&name, kind.get_item(&name)?)?;
    }
    let request = py.import("types")?.getattr("SimpleNamespace")?.call((), Some(&said))?;
    let parts = Parts::read(RequestArg(request.as_borrowed()))?;
    let embeds = parts.prompt_embeds.as_ref();
    let retention = request.getattr("retention")?;
    let retention = (!retention.is_none()).then(|| pieces(RetentionArg(retention.as_borrowed())));
    Ok(KindOfRequest {
        own_hashes: !request.getattr("block_hashes")?.is_none(),
        retention: retention.transpose()?,
        cache_salt: parts.cache_salt.as_ref().map(|salt| salt.extract()).transpose()?,
        embeds: embeds.map(|(data, size)| (data.as_bytes().to_vec(), *size)),
        skip_reading: request.getattr("skip_reading_prefix_cache")?.is_truthy()?,
        lora: parts.lora,
        media: parts.media,
    })
}
