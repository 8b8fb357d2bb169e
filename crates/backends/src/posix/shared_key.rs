//! The key that signs ids of files at all servers of one directory.
//!
//! Each server of a projection has to understand the ids that another one gave out. The key lies in
//! an attribute of the directory that they share. The kernel shows `trusted.*` to the super-user
//! alone (xattr(7)), and the backend shows this one to no client. A client that has it can make up
//! ids of files that are outside of the export.

use std::os::fd::AsFd;

use dray_core::{Errno, Result, XattrSet};

use super::{Root, sys};

/// The attribute of the directory.
pub(crate) const NAME: &[u8] = b"trusted.dray.id_key";

impl Root {
    /// Reads the key, or makes it. Servers that make it at the same time agree on the first. None where the file
    /// system has no such attributes, as NFS. Errors: those of getxattr(2) and setxattr(2), such as
    /// `EROFS`.
    pub fn shared_id_key(&self) -> Result<Option<u128>> {
        let (dir, name) = (self.dir.as_fd(), sys::xattr_name(NAME)?);
        let read = || sys::get_xattr(dir, &name);
        let value = match read() {
            Err(Errno::ENODATA) => {
                let mut key = [0; 16];
                dray_rt::random_bytes(&mut key);
                match sys::set_xattr(dir, &name, &key, XattrSet::Create) {
                    Ok(()) | Err(Errno::EEXIST) => read()?,
                    Err(Errno::ENOTSUP) => return Ok(None),
                    Err(errno) => return Err(errno.into()),
                }
            }
            Err(Errno::ENOTSUP) => return Ok(None),
            value => value?,
        };
        let key: [u8; 16] = value.try_into().map_err(|_| Errno::EBADMSG)?;
        Ok(Some(u128::from_le_bytes(key)))
    }
}

/// `names` as listxattr(2) gives them, without the key's.
pub(crate) fn left_out(names: Vec<u8>) -> Vec<u8> {
    if !names.windows(NAME.len()).any(|part| part == NAME) {
        return names;
    }
    let others = names.split_inclusive(|byte| *byte == 0);
    others.filter(|name| name.strip_suffix(b"\0") != Some(NAME)).flatten().copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_left_out_and_nothing_else() {
        for (names, others) in [
            (&b"user.a\0trusted.dray.id_key\0user.b\0"[..], &b"user.a\0user.b\0"[..]),
            (b"trusted.dray.id_key\0", b""),
            (b"trusted.dray.id_key2\0user.a\0", b"trusted.dray.id_key2\0user.a\0"),
            (b"", b""),
        ] {
            assert_eq!(left_out(names.to_vec()), others);
        }
    }
}
