//! Files that other clients changed: a server notifies clients that cache them while they are open
//! ([`NotifyHead::CHANGED`](super::NotifyHead::CHANGED)).

use dray_core::FileId;

use crate::wire::codec::{Input, Malformed, Wire};

/// Files in one message.
pub const CHANGED_MAX: usize = 256;

/// Appends them; [`CHANGED_MAX`] at most, and their number is the head's argument.
pub fn put_changed(files: &[FileId], out: &mut Vec<u8>) {
    files.iter().for_each(|file| file.put(out));
}

/// Takes `count` of them off again. Errors: too many, or fewer are there.
pub fn get_changed(count: u32, input: &mut Input<'_>) -> Result<Vec<FileId>, Malformed> {
    match count as usize <= CHANGED_MAX {
        true => (0..count).map(|_| input.get()).collect(),
        false => Err(Malformed("too many changed files")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_notification_is_bounded() {
        let files: Vec<FileId> =
            (0..CHANGED_MAX as u64).map(|ino| FileId { ino, generation: 2 }).collect();
        let mut message = Vec::new();
        put_changed(&files, &mut message);
        let count = CHANGED_MAX as u32;
        assert_eq!(get_changed(count, &mut Input(&message)), Ok(files));
        assert!(get_changed(count, &mut Input(&message[1..])).is_err());
        message.extend([0; 16]);
        assert!(get_changed(count + 1, &mut Input(&message)).is_err());
    }
}
