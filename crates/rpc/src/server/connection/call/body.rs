//! The arguments of a call, as they came.

use std::ops::Deref;

/// Arguments of more bytes than these have memory of their own. Reads and writes have 20 to 30.
const SHORT_MAX_BYTES: usize = 47;

/// The encoded arguments of a call, until it ends.
pub(in crate::server::connection) enum CallBody {
    Short { bytes: [u8; SHORT_MAX_BYTES], len: u8 },
    Long(Box<[u8]>),
}

impl From<&[u8]> for CallBody {
    fn from(encoded: &[u8]) -> CallBody {
        let mut bytes = [0; SHORT_MAX_BYTES];
        match bytes.get_mut(..encoded.len()) {
            Some(place) => {
                place.copy_from_slice(encoded);
                CallBody::Short { bytes, len: encoded.len() as u8 }
            }
            None => CallBody::Long(encoded.into()),
        }
    }
}

impl Deref for CallBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            CallBody::Short { bytes, len } => &bytes[..usize::from(*len)],
            CallBody::Long(bytes) => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_of_any_length_stay_as_they_are() {
        let bytes: Vec<u8> = (0..100).collect();
        for len in 0..bytes.len() {
            let body = CallBody::from(&bytes[..len]);
            assert_eq!(&*body, &bytes[..len]);
            assert_eq!(matches!(body, CallBody::Long(_)), len > SHORT_MAX_BYTES);
        }
    }
}
