//! The events that fanotify(7) gives, as they are in the buffer.

use dray_core::LeaseKinds;

use super::super::sys::KernelHandle;

/// Bytes of `struct fanotify_event_metadata`.
const HEAD_BYTES: usize = 24;
/// `FANOTIFY_METADATA_VERSION`.
const VERSION: u8 = 3;
/// Bytes of `struct fanotify_event_info_header`.
const INFO_HEAD_BYTES: usize = 4;
/// `FAN_EVENT_INFO_TYPE_FID`: a handle follows, behind an identity of the file system of 8 bytes.
const INFO_FID: u8 = 1;
const FS_ID_BYTES: usize = 8;
/// Changes of names. They are reported of the directory.
const OF_NAMES: u64 =
    libc::FAN_CREATE | libc::FAN_DELETE | libc::FAN_MOVED_FROM | libc::FAN_MOVED_TO;

/// An event.
#[derive(Clone, Copy)]
pub(super) enum OutsideEvent {
    /// A file was changed, by any thread of the machine.
    Changed {
        /// The handle of the file.
        handle: KernelHandle,
        /// The thread as this process sees it; 0 for one that this process cannot see.
        thread: i32,
        /// The leases that the change breaks.
        kinds: LeaseKinds,
    },
    /// Events were lost, or cannot be read.
    Missed,
}

/// The events of a buffer. What cannot be read ends them, as missed.
pub(super) struct OutsideEvents<'a> {
    rest: &'a [u8],
}

impl<'a> OutsideEvents<'a> {
    pub(super) fn of(buffer: &'a [u8]) -> OutsideEvents<'a> {
        OutsideEvents { rest: buffer }
    }
}

impl Iterator for OutsideEvents<'_> {
    type Item = OutsideEvent;

    fn next(&mut self) -> Option<OutsideEvent> {
        if self.rest.is_empty() {
            return None;
        }
        let read =
            u32_at(self.rest, 0).and_then(|bytes| self.rest.split_at_checked(bytes as usize));
        match read {
            Some((event, rest)) if event.len() >= HEAD_BYTES => {
                self.rest = rest;
                Some(parse(event).unwrap_or(OutsideEvent::Missed))
            }
            _ => {
                self.rest = &[];
                Some(OutsideEvent::Missed)
            }
        }
    }
}

/// One event, of at least [`HEAD_BYTES`].
fn parse(event: &[u8]) -> Option<OutsideEvent> {
    let (version, head_bytes) = (*event.get(4)?, u16_at(event, 6)?);
    let mask = u64::from_ne_bytes(event.get(8..16)?.try_into().ok()?);
    let thread = i32::from_ne_bytes(event.get(20..24)?.try_into().ok()?);
    if version != VERSION || mask & libc::FAN_Q_OVERFLOW != 0 {
        return None;
    }
    let handle = handle_of(event.get(usize::from(head_bytes)..)?)?;
    // Who may look names up in a directory is among its attributes.
    let kinds = match mask & (OF_NAMES | libc::FAN_ONDIR) {
        0 => LeaseKinds::ATTRIBUTES,
        _ => LeaseKinds::ALL,
    };
    Some(OutsideEvent::Changed { handle, thread, kinds })
}

/// The file's handle among the records that follow the head. None: the file system gave none.
fn handle_of(mut records: &[u8]) -> Option<KernelHandle> {
    loop {
        let (kind, bytes) = (*records.first()?, usize::from(u16_at(records, 2)?));
        let (record, rest) = records.split_at_checked(bytes)?;
        let content = record.get(INFO_HEAD_BYTES..)?;
        if kind == INFO_FID {
            let handle = content.get(FS_ID_BYTES..)?;
            let (bytes, kind) = (u32_at(handle, 0)? as usize, u32_at(handle, 4)? as i32);
            let bytes = handle.get(8..)?.get(..bytes).filter(|bytes| !bytes.is_empty())?;
            return KernelHandle::new(kind, &[bytes]);
        }
        records = rest;
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: u8, content: &[u8]) -> Vec<u8> {
        let bytes = (INFO_HEAD_BYTES + content.len()) as u16;
        [&[kind, 0][..], &bytes.to_ne_bytes(), content].concat()
    }

    fn fid(handle: &[u8]) -> Vec<u8> {
        let head = [(handle.len() as u32).to_ne_bytes(), 1_i32.to_ne_bytes()].concat();
        record(INFO_FID, &[&[9; FS_ID_BYTES][..], &head, handle].concat())
    }

    fn event(mask: u64, records: &[u8]) -> Vec<u8> {
        let bytes = (HEAD_BYTES + records.len()) as u32;
        let head = [
            &bytes.to_ne_bytes()[..],
            &[VERSION, 0],
            &(HEAD_BYTES as u16).to_ne_bytes(),
            &mask.to_ne_bytes(),
            &(-1_i32).to_ne_bytes(),
            &77_i32.to_ne_bytes(),
        ];
        [&head.concat(), records].concat()
    }

    fn read(buffer: &[u8]) -> Vec<Option<(Vec<u8>, i32, LeaseKinds)>> {
        let shown = |event| match event {
            OutsideEvent::Changed { handle, thread, kinds } => {
                Some((handle.bytes().to_vec(), thread, kinds))
            }
            OutsideEvent::Missed => None,
        };
        OutsideEvents::of(buffer).map(shown).collect()
    }

    #[test]
    fn an_event_says_which_file_and_what_it_breaks() {
        let unknown = record(200, b"something new");
        let events = [
            event(libc::FAN_MODIFY, &fid(b"file")),
            event(libc::FAN_ATTRIB | libc::FAN_ONDIR, &fid(b"dir")),
            event(libc::FAN_CREATE, &[unknown, fid(b"dir")].concat()),
        ];
        let expected = |handle: &[u8], kinds| Some((handle.to_vec(), 77, kinds));
        assert_eq!(
            read(&events.concat()),
            [
                expected(b"file", LeaseKinds::ATTRIBUTES),
                expected(b"dir", LeaseKinds::ALL),
                expected(b"dir", LeaseKinds::ALL)
            ]
        );
    }

    #[test]
    fn what_was_lost_or_has_no_handle_is_missed_and_the_others_are_read() {
        let events = [
            event(libc::FAN_Q_OVERFLOW, &[]),
            event(libc::FAN_MODIFY, &[]),
            event(libc::FAN_MODIFY, &fid(b"")),
            event(libc::FAN_MODIFY, &fid(&[1; 200])),
            event(libc::FAN_MODIFY, &fid(b"file")),
        ];
        let read = read(&events.concat());
        assert_eq!(
            read.iter().map(Option::is_some).collect::<Vec<_>>(),
            [false, false, false, false, true]
        );
    }

    /// Each byte takes each of some values, and the buffer ends at each place: nothing panics, and nothing is
    /// read for ever.
    #[test]
    fn whatever_is_in_a_buffer_is_read_to_an_end() {
        let whole = [event(libc::FAN_MODIFY, &fid(b"file")), event(libc::FAN_DELETE, &fid(b"dir"))]
            .concat();
        for end in 0..whole.len() {
            assert!(read(&whole[..end]).len() <= 2);
        }
        for at in 0..whole.len() {
            for value in [0, 1, 3, 4, 23, 24, 0x7f, 0x80, 0xff] {
                let mut hostile = whole.clone();
                hostile[at] = value;
                assert!(!read(&hostile).is_empty() && read(&hostile).len() <= hostile.len());
            }
        }
    }
}
