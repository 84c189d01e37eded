// SPDX-License-Identifier: Apache-2.0
//! A request from the canonical bytes of a state.

use std::sync::Arc;

use crate::state::state::{NO_HOST_BLOCK, RequestState};
use crate::types::config::Config;
use crate::types::errors::Error;
use crate::types::extra_inputs::{ExtraKeys, LoRA, MediaItem};
use crate::types::ids::{BlockId, Table};
use crate::types::wire::Reader;

/// The next request.
pub(crate) fn read_request(
    source: &mut Reader<'_>,
    config: &Config,
) -> Result<RequestState, Error> {
    let mut request = RequestState {
        request_id: Arc::from(source.name()?),
        tokens: source.numbers()?,
        drafts: source.numbers()?,
        block_hashes: source.hashes()?,
        own_hashes: source.flag()?,
        skip_reading: source.flag()?,
        extra_keys: Some(read_extra_keys(source)?).filter(|keys| !keys.is_empty()).map(Arc::new),
        num_computed: source.u32()?,
        ..RequestState::default()
    };
    for _ in &config.groups {
        request.tables.push(source.blocks(config.num_blocks)?);
        request.num_cached.push(source.u32()?);
    }
    if source.flag()? {
        if config.num_host_blocks == 0 {
            return Err(source.damaged("a request is in a host tier that does not exist"));
        }
        for _ in &config.groups {
            request.host_tables.push(read_host_table(source, config.num_host_blocks)?);
        }
    }
    request.preempted = source.flag()?;
    request.num_loading = source.u32()?;
    request.load_end = source.u32()?;
    Ok(request)
}

fn read_host_table(source: &mut Reader<'_>, num_blocks: u32) -> Result<Table, Error> {
    let table: Table = source.numbers()?.into_iter().map(BlockId).collect();
    if table.iter().any(|&block| block.0 >= num_blocks && block != NO_HOST_BLOCK) {
        return Err(source.damaged(format!("an id is not below {num_blocks}")));
    }
    Ok(table)
}

fn read_extra_keys(source: &mut Reader<'_>) -> Result<ExtraKeys, Error> {
    let reason = "an extra key of the wrong form";
    let mut extra_keys = ExtraKeys::default();
    if source.flag()? {
        let (name, path) = (source.name()?.to_owned(), source.name()?.to_owned());
        if name.is_empty() {
            return Err(source.damaged(reason));
        }
        extra_keys.lora = Some(LoRA { name, path });
    }
    extra_keys.media = source.list(|source| {
        let identifier = source.name()?.to_owned();
        let item = MediaItem { identifier, offset: source.u32()?, length: source.u32()? };
        if item.identifier.is_empty() || item.length == 0 {
            return Err(source.damaged(reason));
        }
        Ok(item)
    })?;
    extra_keys.cache_salt = source.text()?;
    extra_keys.embeds = source.hashes()?;
    Ok(extra_keys)
}
