//! What the process of the invalidator is asked to drop, as it is written into its pipe.

use std::io::{self, Read};

use dray_core::Name;

/// Bytes of a node's number, and of a number of requests.
pub(crate) const NUMBER_BYTES: usize = 8;
/// Stands in front of a name. No node has this number.
const NAME_FOLLOWS: u64 = 0;
/// Bytes that are read at once, and room for the part of a request that the last read ended with.
const READ_BYTES: usize = 4096;

/// Something that the kernel is to forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DropRequest<'a> {
    /// Pages and attributes of this node.
    Node(u64),
    /// A name in the directory of this node.
    Name { dir: u64, name: &'a Name },
}

impl DropRequest<'_> {
    /// Appends it, at most 280 bytes. A pipe takes them whole or not at all (`PIPE_BUF`).
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        match *self {
            DropRequest::Node(node) => out.extend(node.to_ne_bytes()),
            DropRequest::Name { dir, name } => {
                let name = name.as_bytes();
                [NAME_FOLLOWS, dir, name.len() as u64]
                    .iter()
                    .for_each(|number| out.extend(number.to_ne_bytes()));
                out.extend(name);
                out.resize(out.len().next_multiple_of(NUMBER_BYTES), 0);
            }
        }
    }
}

/// Requests that were read from the pipe.
#[derive(Default)]
pub(crate) struct DropRequests {
    bytes: Vec<u8>,
    taken: usize,
}

impl DropRequests {
    /// Waits for more. False: no more come. Errors: those of reading.
    pub(crate) fn read_from(&mut self, pipe: &mut impl Read) -> io::Result<bool> {
        self.bytes.drain(..std::mem::take(&mut self.taken));
        let known = self.bytes.len();
        self.bytes.resize(known + READ_BYTES, 0);
        let read = loop {
            match pipe.read(&mut self.bytes[known..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        self.bytes.truncate(known + read);
        Ok(read > 0)
    }

    /// The next one that is whole. Errors: `EPROTO`.
    pub(crate) fn next(&mut self) -> io::Result<Option<DropRequest<'_>>> {
        let (numbers, _) = self.bytes[self.taken..].as_chunks::<NUMBER_BYTES>();
        let number = |index: usize| numbers.get(index).map(|bytes| u64::from_ne_bytes(*bytes));
        match (number(0), number(1), number(2)) {
            (Some(NAME_FOLLOWS), Some(dir), Some(len_bytes)) => {
                let malformed = || io::Error::from_raw_os_error(libc::EPROTO);
                let len_bytes = usize::try_from(len_bytes).map_err(|_| malformed())?;
                if len_bytes > READ_BYTES / 2 {
                    return Err(malformed());
                }
                let at = self.taken + 3 * NUMBER_BYTES;
                let end = at + len_bytes.next_multiple_of(NUMBER_BYTES);
                if end > self.bytes.len() {
                    return Ok(None);
                }
                self.taken = end;
                let name = Name::new(&self.bytes[at..at + len_bytes]).map_err(|_| malformed())?;
                Ok(Some(DropRequest::Name { dir, name }))
            }
            (Some(NAME_FOLLOWS) | None, ..) => Ok(None),
            (Some(node), ..) => {
                self.taken += NUMBER_BYTES;
                Ok(Some(DropRequest::Node(node)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pipe that has so many bytes at a time.
    struct Slow<'a>(&'a [u8], usize);

    impl Read for Slow<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let count = self.1.min(self.0.len()).min(out.len());
            out[..count].copy_from_slice(&self.0[..count]);
            self.0 = &self.0[count..];
            Ok(count)
        }
    }

    #[test]
    fn requests_arrive_whole_whatever_a_pipe_has_of_them() {
        let long = "n".repeat(255);
        let names = ["a", "12345678", &long].map(|name| Name::new(name.as_bytes()));
        let mut sent = vec![DropRequest::Node(7)];
        for name in names {
            sent.push(DropRequest::Name { dir: 3, name: name.unwrap() });
            sent.push(DropRequest::Node(u64::MAX));
        }
        let mut bytes = Vec::new();
        sent.iter().for_each(|request| request.put(&mut bytes));
        for at_a_time in [1, 5, 8, 100, 4096] {
            let (mut pipe, mut requests) = (Slow(&bytes, at_a_time), DropRequests::default());
            let mut got = 0;
            while requests.read_from(&mut pipe).unwrap() {
                while let Some(request) = requests.next().unwrap() {
                    assert_eq!(request, sent[got]);
                    got += 1;
                }
            }
            assert_eq!(got, sent.len());
        }
    }

    #[test]
    fn what_nobody_writes_is_an_error() {
        for (len, name) in [(u64::MAX, 0u64), (3000, 0), (0, 0), (1, u64::from(b'/'))] {
            let bytes = [NAME_FOLLOWS, 1, len, name].map(u64::to_ne_bytes).concat();
            let mut requests = DropRequests::default();
            assert!(requests.read_from(&mut &bytes[..]).unwrap());
            assert!(requests.next().is_err(), "{len}");
        }
    }
}
