// SPDX-License-Identifier: Apache-2.0
//! Values as few bytes, the parts of packed states and nodes.
//!
//! A part of packed.rs. Numbers take a byte if they are small.

use smallvec::{Array, SmallVec};

use crate::oracle::calls::Name;
use crate::types::commands::{Commands, Tier};
use crate::types::ids::{BlockId, Row};
use crate::types::keys::{KEY_SIZE, Key};

pub(super) fn write_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    (bytes.len() as u32).write(out);
    out.extend_from_slice(bytes);
}

pub(super) fn read_bytes<'a>(source: &mut &'a [u8]) -> &'a [u8] {
    let size = u32::read(source) as usize;
    let (bytes, rest) = source.split_at(size);
    *source = rest;
    bytes
}

/// A value that is a part of packed nodes.
pub(super) trait Packed: Sized {
    fn write(&self, out: &mut Vec<u8>);

    /// Read a value of bytes that `write` gave, and take them off.
    fn read(source: &mut &[u8]) -> Self;
}

impl Packed for u64 {
    /// Write seven bits per byte, the last one below 128.
    fn write(&self, out: &mut Vec<u8>) {
        let mut number = *self;
        while number >= 128 {
            out.push(number as u8 | 128);
            number >>= 7;
        }
        out.push(number as u8);
    }

    fn read(source: &mut &[u8]) -> Self {
        let (mut number, mut shift) = (0, 0);
        loop {
            let byte = u8::read(source);
            number |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return number;
            }
            shift += 7;
        }
    }
}

impl Packed for u8 {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(*self);
    }

    fn read(source: &mut &[u8]) -> Self {
        let (&first, rest) = source.split_first().expect("packed nodes are written by pack_node");
        *source = rest;
        first
    }
}

/// Values that are packed as another kind of value.
macro_rules! packed_as {
    ($($kind:ty: $other:ty, $to:expr, $from:expr;)*) => {
        $(impl Packed for $kind {
            fn write(&self, out: &mut Vec<u8>) {
                let to: fn(&$kind) -> $other = $to;
                to(self).write(out);
            }

            fn read(source: &mut &[u8]) -> Self {
                let from: fn($other) -> $kind = $from;
                from(<$other>::read(source))
            }
        })*
    };
}

packed_as! {
    u32: u64, |number| u64::from(*number), |number| number as u32;
    i32: u32, |number| *number as u32, |number| number as i32;
    bool: u8, |flag| u8::from(*flag), |byte| byte > 0;
    Row: u32, |row| row.0, Row;
    BlockId: u32, |block| block.0, BlockId;
    Name: u8, |name| name.0, Name;
    Tier: bool, |tier| *tier == Tier::Host, |host| if host { Tier::Host } else { Tier::Device };
}

impl Packed for Key {
    fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.0);
    }

    fn read(source: &mut &[u8]) -> Self {
        let (key, rest) = source.split_first_chunk::<KEY_SIZE>().expect("a key was written");
        *source = rest;
        Key(*key)
    }
}

impl Packed for Commands {
    fn write(&self, out: &mut Vec<u8>) {
        self.rows.write(out);
        write_bytes(self.keys.as_flattened(), out);
        self.moving.write(out);
    }

    fn read(source: &mut &[u8]) -> Self {
        let (rows, keys) = (Vec::read(source), read_bytes(source).as_chunks().0.to_vec());
        Commands { rows, keys, moving: Vec::read(source) }
    }
}

impl<T: Packed> Packed for Option<T> {
    fn write(&self, out: &mut Vec<u8>) {
        self.is_some().write(out);
        self.iter().for_each(|value| value.write(out));
    }

    fn read(source: &mut &[u8]) -> Self {
        bool::read(source).then(|| T::read(source))
    }
}

impl<T: Packed> Packed for Vec<T> {
    fn write(&self, out: &mut Vec<u8>) {
        (self.len() as u32).write(out);
        self.iter().for_each(|value| value.write(out));
    }

    fn read(source: &mut &[u8]) -> Self {
        (0..u32::read(source)).map(|_| T::read(source)).collect()
    }
}

impl<A: Array<Item: Packed>> Packed for SmallVec<A> {
    fn write(&self, out: &mut Vec<u8>) {
        (self.len() as u32).write(out);
        self.iter().for_each(|value| value.write(out));
    }

    fn read(source: &mut &[u8]) -> Self {
        (0..u32::read(source)).map(|_| A::Item::read(source)).collect()
    }
}

impl<T: Packed + Copy + Default, const N: usize> Packed for [T; N] {
    fn write(&self, out: &mut Vec<u8>) {
        self.iter().for_each(|value| value.write(out));
    }

    fn read(source: &mut &[u8]) -> Self {
        std::array::from_fn(|_| T::read(source))
    }
}

/// Tuples and structs: their fields in order.
macro_rules! packed {
    ($($name:ident { $($field:ident),* $(,)? })*) => {
        $(impl Packed for $name {
            fn write(&self, out: &mut Vec<u8>) {
                $(self.$field.write(out);)*
            }

            fn read(source: &mut &[u8]) -> Self {
                $name { $($field: Packed::read(source)),* }
            }
        })*
    };
    ($(($($kind:ident $place:tt),*))*) => {
        $(impl<$($kind: Packed),*> Packed for ($($kind,)*) {
            fn write(&self, out: &mut Vec<u8>) {
                $(self.$place.write(out);)*
            }

            fn read(source: &mut &[u8]) -> Self {
                ($($kind::read(source),)*)
            }
        })*
    };
}

packed! {
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
}

pub(super) use packed;
