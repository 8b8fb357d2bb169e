//! The encoding: fields one after the other, little-endian, byte strings behind their
//! length.

use std::fmt;

/// The bytes received are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "malformed message: {}", self.0)
    }
}

impl std::error::Error for Malformed {}

impl From<Malformed> for std::io::Error {
    fn from(malformed: Malformed) -> std::io::Error {
        std::io::Error::new(std::io::ErrorKind::InvalidData, malformed)
    }
}

/// Bytes not decoded yet.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Takes the next `count` bytes.
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Malformed("cut short"))?;
        self.0 = rest;
        Ok(taken)
    }

    /// Takes the next value.
    pub fn get<T: Wire<'a>>(&mut self) -> Result<T, Malformed> {
        T::get(self)
    }

    /// Decodes one value that must be all there is.
    pub fn whole<T: Wire<'a>>(bytes: &'a [u8]) -> Result<T, Malformed> {
        let mut input = Input(bytes);
        let value = input.get()?;
        if input.0.is_empty() { Ok(value) } else { Err(Malformed("bytes left over")) }
    }
}

/// A value that can travel.
pub trait Wire<'a>: Sized {
    /// Appends it.
    fn put(&self, out: &mut Vec<u8>);
    /// Takes it off the input.
    fn get(input: &mut Input<'a>) -> Result<Self, Malformed>;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl<'a> Wire<'a> for $type {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn get(input: &mut Input<'a>) -> Result<Self, Malformed> {
                let (bytes, rest) = input.0.split_first_chunk().ok_or(Malformed("cut short"))?;
                input.0 = rest;
                Ok(<$type>::from_le_bytes(*bytes))
            }
        }
    )*};
}

integers!(u8, u16, u32, u64, u128, i32, i64);

impl<'a> Wire<'a> for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
    fn get(input: &mut Input<'a>) -> Result<bool, Malformed> {
        match input.get::<u8>()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("neither true nor false")),
        }
    }
}

impl<'a> Wire<'a> for () {
    fn put(&self, _: &mut Vec<u8>) {}
    fn get(_: &mut Input<'a>) -> Result<(), Malformed> {
        Ok(())
    }
}

impl<'a> Wire<'a> for &'a [u8] {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        out.extend_from_slice(self);
    }
    fn get(input: &mut Input<'a>) -> Result<&'a [u8], Malformed> {
        let len = input.get::<u32>()? as usize;
        input.take(len)
    }
}

impl<'a> Wire<'a> for Vec<u8> {
    fn put(&self, out: &mut Vec<u8>) {
        (&self[..]).put(out);
    }
    fn get(input: &mut Input<'a>) -> Result<Vec<u8>, Malformed> {
        Ok(input.get::<&[u8]>()?.to_vec())
    }
}

impl<'a> Wire<'a> for &'a str {
    fn put(&self, out: &mut Vec<u8>) {
        self.as_bytes().put(out);
    }
    fn get(input: &mut Input<'a>) -> Result<&'a str, Malformed> {
        std::str::from_utf8(input.get()?).map_err(|_| Malformed("text that is not UTF-8"))
    }
}

impl<'a> Wire<'a> for String {
    fn put(&self, out: &mut Vec<u8>) {
        self.as_bytes().put(out);
    }
    fn get(input: &mut Input<'a>) -> Result<String, Malformed> {
        input.get::<&str>().map(str::to_owned)
    }
}

impl<'a, const N: usize> Wire<'a> for [u8; N] {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
    fn get(input: &mut Input<'a>) -> Result<[u8; N], Malformed> {
        let (bytes, rest) = input.0.split_first_chunk().ok_or(Malformed("cut short"))?;
        input.0 = rest;
        Ok(*bytes)
    }
}

impl<'a, T: Wire<'a>> Wire<'a> for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }
    fn get(input: &mut Input<'a>) -> Result<Option<T>, Malformed> {
        if input.get()? { input.get().map(Some) } else { Ok(None) }
    }
}

impl<'a, A: Wire<'a>, B: Wire<'a>> Wire<'a> for (A, B) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }
    fn get(input: &mut Input<'a>) -> Result<(A, B), Malformed> {
        Ok((input.get()?, input.get()?))
    }
}

/// A field that later versions have appended to a message. Where the message ends before it, as in
/// the versions before, it has its default value. A default value is not written at the end, so
/// that a message without it is what it was. A version that appends one more writes all before it.
pub(crate) trait AppendedField<'a>: Wire<'a> + Default + PartialEq {
    fn put_at_end(&self, out: &mut Vec<u8>) {
        if *self != Self::default() {
            self.put(out);
        }
    }
    fn get_at_end(input: &mut Input<'a>) -> Result<Self, Malformed> {
        if input.0.is_empty() { Ok(Self::default()) } else { input.get() }
    }
}

impl<'a, T: Wire<'a> + Default + PartialEq> AppendedField<'a> for T {}

/// Defines a struct and its encoding: its fields in order.
macro_rules! wire_struct {
    ($(#[$doc:meta])* $name:ident {
        $($(#[$field_doc:meta])* $field:ident: $type:ty),* ;
        $($(#[$last_doc:meta])* appended $last:ident: $last_type:ty),+ $(,)?
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
            $($(#[$last_doc])* pub $last: $last_type),+
        }

        impl<'a> $crate::wire::Wire<'a> for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
                // All of them or none: of those that are not written each has its default.
                if $(self.$last != <$last_type as Default>::default())||+ {
                    $(self.$last.put(out);)+
                }
            }
            fn get(input: &mut $crate::wire::Input<'a>) -> Result<Self, $crate::wire::Malformed> {
                Ok($name {
                    $($field: input.get()?,)*
                    $($last: $crate::wire::codec::AppendedField::get_at_end(input)?),+
                })
            }
        }
    };
    ($(#[$doc:meta])* $name:ident $(<$a:lifetime>)? {
        $($(#[$field_doc:meta])* $field:ident: $type:ty),* $(,)?
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name $(<$a>)? { $($(#[$field_doc])* pub $field: $type),* }

        $crate::wire::codec::wire_fields!($name $(<$a>)? { $($field),* });
    };
}

/// The encoding of a struct defined elsewhere.
macro_rules! wire_fields {
    ($name:ident { $($field:ident),* }) => {
        impl<'a> $crate::wire::Wire<'a> for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }
            fn get(input: &mut $crate::wire::Input<'a>) -> Result<Self, $crate::wire::Malformed> {
                Ok($name { $($field: input.get()?),* })
            }
        }
    };
    ($name:ident<$a:lifetime> { $($field:ident),* }) => {
        impl<$a> $crate::wire::Wire<$a> for $name<$a> {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }
            fn get(input: &mut $crate::wire::Input<$a>) -> Result<Self, $crate::wire::Malformed> {
                Ok($name { $($field: input.get()?),* })
            }
        }
    };
}

/// The encoding of an enum without fields: its numbers, which never change.
macro_rules! wire_numbers {
    ($type:ty { $($variant:path = $number:literal),* $(,)? }) => {
        impl<'a> $crate::wire::Wire<'a> for $type {
            fn put(&self, out: &mut Vec<u8>) {
                out.push(match self { $($variant => $number),* });
            }
            fn get(input: &mut $crate::wire::Input<'a>) -> Result<Self, $crate::wire::Malformed> {
                match input.get::<u8>()? {
                    $($number => Ok($variant),)*
                    _ => Err($crate::wire::Malformed(concat!("unknown ", stringify!($type)))),
                }
            }
        }
    };
}

pub(crate) use {wire_fields, wire_numbers, wire_struct};
