//! Numbers and texts of variable length.

use super::segment::Corruption;

/// Appends a number, 7 bits a byte, the lowest first (LEB128).
pub(super) fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Appends a number with a sign, small ones of both signs short.
pub(super) fn put_signed(out: &mut Vec<u8>, number: i64) {
    put(out, (number << 1 ^ number >> 63) as u64);
}

/// Appends a text with its length.
pub(super) fn put_text(out: &mut Vec<u8>, text: &[u8]) {
    put(out, text.len() as u64);
    out.extend_from_slice(text);
}

/// Bytes that are decoded from the front.
pub(super) struct RecordInput<'a>(pub(super) &'a [u8]);

impl<'a> RecordInput<'a> {
    pub(super) fn byte(&mut self) -> Result<u8, Corruption> {
        let (first, rest) = self.0.split_first().ok_or(Corruption("it ends within a record"))?;
        self.0 = rest;
        Ok(*first)
    }

    pub(super) fn number(&mut self) -> Result<u64, Corruption> {
        let (mut number, mut shift) = (0u64, 0);
        loop {
            let byte = self.byte()?;
            if shift == 63 && byte > 1 {
                return Err(Corruption("a number is too large"));
            }
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
            shift += 7;
        }
    }

    pub(super) fn small(&mut self) -> Result<u32, Corruption> {
        u32::try_from(self.number()?).map_err(|_| Corruption("a number is too large"))
    }

    pub(super) fn signed(&mut self) -> Result<i64, Corruption> {
        let number = self.number()?;
        Ok((number >> 1) as i64 ^ -((number & 1) as i64))
    }

    pub(super) fn bytes(&mut self, len_bytes: usize) -> Result<&'a [u8], Corruption> {
        let (text, rest) =
            self.0.split_at_checked(len_bytes).ok_or(Corruption("it ends within a text"))?;
        self.0 = rest;
        Ok(text)
    }

    pub(super) fn text(&mut self) -> Result<&'a [u8], Corruption> {
        let len_bytes = usize::try_from(self.number()?).map_err(|_| Corruption("too long"))?;
        self.bytes(len_bytes)
    }
}
