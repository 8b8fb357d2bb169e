//! Extended attributes that the files of a listing do not have.
//!
//! `ls -l` asks for some of each file, and most files have none of them. So a page of a listing says that
//! beforehand, behind its entries, to a client that wants it
//! ([`CallHead::WANTS_ABSENCES`](crate::wire::CallHead)).

use dray_core::DirPage;

use crate::wire::codec::{Input, Malformed, Wire};

/// Attributes that listings ask for, and that most files do not have.
pub const LISTED_XATTRS: [&[u8]; 4] = [
    b"system.posix_acl_access",
    b"system.posix_acl_default",
    b"security.capability",
    b"security.selinux",
];

/// The attributes that a file is known not to have: to ask for one of them is `ENODATA`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AbsentXattrs(u8);

impl AbsentXattrs {
    /// Nothing is known.
    pub const UNKNOWN: AbsentXattrs = AbsentXattrs(0);
    /// The file has no extended attributes at all: their list is empty for each caller.
    pub const ALL: AbsentXattrs = AbsentXattrs(1 << LISTED_XATTRS.len());

    /// The attribute `name`, if it is one of [`LISTED_XATTRS`].
    pub fn of(name: &[u8]) -> Option<AbsentXattrs> {
        LISTED_XATTRS.iter().position(|known| *known == name).map(|at| AbsentXattrs(1 << at))
    }

    /// These, and `others` besides.
    pub fn with(self, others: AbsentXattrs) -> AbsentXattrs {
        AbsentXattrs(self.0 | others.0)
    }

    /// Whether these are among them.
    pub fn contains(self, others: AbsentXattrs) -> bool {
        self.0 & others.0 == others.0
    }
}

/// Appends a page, and what is known of each of its files, if the message stays within `bytes_max`. `absent`: as
/// many as the page has entries; or none, if nothing is to be said.
pub fn put_page(page: &DirPage, absent: &[AbsentXattrs], bytes_max: usize, out: &mut Vec<u8>) {
    assert!(absent.is_empty() || absent.len() == page.len(), "one for each file");
    page.put(out);
    if out.len() + absent.len() <= bytes_max {
        out.extend(absent.iter().map(|absent| absent.0));
    }
}

/// The page and what it says of its files: nothing, or something of each. Errors: it is no such page.
pub fn get_page(bytes: &[u8]) -> Result<(DirPage, Vec<AbsentXattrs>), Malformed> {
    let mut input = Input(bytes);
    let page: DirPage = input.get()?;
    match input.0 {
        [] => Ok((page, Vec::new())),
        // Bits of later versions say nothing.
        absent if absent.len() == page.len() => {
            Ok((page, absent.iter().map(|bits| AbsentXattrs(*bits)).collect()))
        }
        _ => Err(Malformed("a page that says something else than of each file")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_core::FileId;

    #[test]
    fn a_page_comes_back_with_what_it_says_of_its_files_or_without() {
        let mut page = DirPage::default();
        for ino in 1..4 {
            page.push(b"name", FileId { ino, generation: 0 }, None, ino, None);
        }
        let acl = AbsentXattrs::of(LISTED_XATTRS[0]).unwrap();
        let absent = [AbsentXattrs::UNKNOWN, acl, acl.with(AbsentXattrs::ALL)];
        for absent in [&absent[..], &[]] {
            let mut bytes = Vec::new();
            put_page(&page, absent, 1000, &mut bytes);
            let (again, said) = get_page(&bytes).unwrap();
            assert_eq!((again.len(), said), (3, absent.to_vec()));
            bytes.push(0);
            assert!(get_page(&bytes).is_err());
        }
        let mut bytes = Vec::new();
        put_page(&page, &absent, 10, &mut bytes);
        assert_eq!(get_page(&bytes).unwrap().1, [], "there was no room");
        assert!(absent[2].contains(acl) && !absent[0].contains(acl) && !acl.contains(absent[2]));
        assert_eq!(AbsentXattrs::of(b"user.a"), None);
    }
}
