// SPDX-License-Identifier: Apache-2.0
//! The free queue by itself, for managers whose blocks are objects of their own.
//!
//! Rules: a block stands in the queue once. What is asked is checked first, so that a call which
//! fails leaves the queue as it was. Source: S001-10 to S001-20. Twin:
//! kvcore/pool/queue_transitions.py.

use crate::pool::free_queue::FreeQueue;
use crate::types::errors::Error;
use crate::types::ids::BlockId;

/// Take out the block that leaves next, if there is one.
pub fn popleft(queue: &mut FreeQueue) -> Option<BlockId> {
    let block = queue.front()?;
    queue.remove(block);
    Some(block)
}

/// Take a block out, from wherever it is. Fails with UnknownBlock, NotQueued.
pub fn remove(queue: &mut FreeQueue, block: i64) -> Result<(), Error> {
    let known = check_block(queue, block)?;
    if !queue.contains(known) {
        return Err(Error::NotQueued { block });
    }
    queue.remove(known);
    Ok(())
}

/// Put a block at the back. Fails with UnknownBlock, AlreadyQueued.
pub fn append(queue: &mut FreeQueue, block: i64) -> Result<(), Error> {
    let outside = check_outside(queue, block)?;
    queue.append(outside);
    Ok(())
}

/// Put a block at the front. Fails with UnknownBlock, AlreadyQueued.
pub fn prepend(queue: &mut FreeQueue, block: i64) -> Result<(), Error> {
    let outside = check_outside(queue, block)?;
    queue.prepend(outside);
    Ok(())
}

/// The block that leaves last, if there is one. Does not modify the queue.
#[must_use]
pub fn back(queue: &FreeQueue) -> Option<BlockId> {
    let sentinel = queue.sentinel();
    Some(queue.links(sentinel).0).filter(|&block| block != sentinel).map(BlockId)
}

/// What leaves just before and just after a block; none where it is not in the queue. Does not
/// modify the queue. Fails with UnknownBlock.
pub fn neighbours(queue: &FreeQueue, block: i64) -> Result<[Option<BlockId>; 2], Error> {
    let known = check_block(queue, block)?;
    let (before, after) = queue.links(known.0);
    let other = |block: u32| (block != known.0 && block != queue.sentinel()).then_some(block);
    Ok([before, after].map(|block| other(block).map(BlockId)))
}

/// The block of this number. Fails with UnknownBlock.
pub fn check_block(queue: &FreeQueue, block: i64) -> Result<BlockId, Error> {
    let last = i64::from(queue.sentinel()) - 1;
    if (0..=last).contains(&block) {
        return Ok(BlockId(block as u32));
    }
    Err(Error::UnknownBlock { block, first: 0, last })
}

/// The same of a block that is not in the queue. Fails with AlreadyQueued.
fn check_outside(queue: &FreeQueue, block: i64) -> Result<BlockId, Error> {
    let known = check_block(queue, block)?;
    if queue.contains(known) {
        return Err(Error::AlreadyQueued { block });
    }
    Ok(known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::free_queue::make_free_queue;

    #[test]
    fn a_block_stands_in_the_queue_once() {
        let mut queue = make_free_queue(3, [BlockId(1), BlockId(2)]);
        assert_eq!(append(&mut queue, 2), Err(Error::AlreadyQueued { block: 2 }));
        assert_eq!(remove(&mut queue, 0), Err(Error::NotQueued { block: 0 }));
        let unknown = Error::UnknownBlock { block: 3, first: 0, last: 2 };
        assert_eq!(prepend(&mut queue, 3), Err(unknown));
        prepend(&mut queue, 0).unwrap();
        remove(&mut queue, 1).unwrap();
        append(&mut queue, 1).unwrap();
        let around = [Some(BlockId(0)), Some(BlockId(1))];
        assert_eq!((back(&queue), neighbours(&queue, 2)), (Some(BlockId(1)), Ok(around)));
        let left: Vec<_> = std::iter::from_fn(|| popleft(&mut queue)).collect();
        assert_eq!(left, [0, 2, 1].map(BlockId));
        assert!(queue.is_empty());
    }
}
