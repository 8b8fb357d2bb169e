//! Reading and writing of fixed-size fields.

/// Takes fields off a request, front to back. Reading past the end answers none.
pub(crate) struct FieldReader<'a>(pub(crate) &'a [u8]);

impl<'a> FieldReader<'a> {
    pub(crate) fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count)?;
        self.0 = tail;
        Some(head)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        Some(u16::from_ne_bytes(self.bytes(2)?.try_into().ok()?))
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        Some(u32::from_ne_bytes(self.bytes(4)?.try_into().ok()?))
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        Some(u64::from_ne_bytes(self.bytes(8)?.try_into().ok()?))
    }

    /// Bytes up to a NUL byte, which is taken too.
    pub(crate) fn string(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|&byte| byte == 0)?;
        let (head, tail) = self.0.split_at(end);
        self.0 = &tail[1..];
        Some(head)
    }
}

/// Bytes of the longest fixed-size answer: that to STATX.
const SMALL_BYTES: usize = 288;

/// An answer of fixed-size fields, kept in place: most answers need no allocation.
pub(crate) struct Small {
    bytes: [u8; SMALL_BYTES],
    len: usize,
}

impl Small {
    pub(crate) fn new() -> Small {
        Small { bytes: [0; SMALL_BYTES], len: 0 }
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    pub(crate) fn put(mut self, field: &[u8]) -> Small {
        self.bytes[self.len..self.len + field.len()].copy_from_slice(field);
        self.len += field.len();
        self
    }

    pub(crate) fn u16(self, value: u16) -> Small {
        self.put(&value.to_ne_bytes())
    }

    pub(crate) fn u32(self, value: u32) -> Small {
        self.put(&value.to_ne_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> Small {
        self.put(&value.to_ne_bytes())
    }

    /// Several at a time and in place. What takes and gives all of it moves its bytes, which for
    /// the many fields of an entry costs more than to fill them in.
    pub(crate) fn put_u32s<const COUNT: usize>(&mut self, values: [u32; COUNT]) {
        for value in values {
            self.bytes[self.len..self.len + 4].copy_from_slice(&value.to_ne_bytes());
            self.len += 4;
        }
    }

    /// As [`Small::put_u32s`].
    pub(crate) fn put_u64s<const COUNT: usize>(&mut self, values: [u64; COUNT]) {
        for value in values {
            self.bytes[self.len..self.len + 8].copy_from_slice(&value.to_ne_bytes());
            self.len += 8;
        }
    }

    pub(crate) fn zeros(mut self, count: usize) -> Small {
        self.len += count; // zero from the beginning
        assert!(self.len <= SMALL_BYTES);
        self
    }
}
