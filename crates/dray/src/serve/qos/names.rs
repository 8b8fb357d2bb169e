//! Users, groups and projects by their names, as this machine knows them.

use std::ffi::CString;
use std::io::Read;

/// Longest entry of a user or a group, bytes: one with thousands of members is long.
const ENTRY_MAX_BYTES: usize = 1 << 20;

/// The id of a user; none: there is none of that name.
pub fn uid_of(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; ENTRY_MAX_BYTES];
    // SAFETY: all zeros is a passwd.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: the name ends with a zero, and all that is written to outlives the call.
    let error = unsafe {
        let (at, len) = (buffer.as_mut_ptr(), buffer.len());
        libc::getpwnam_r(name.as_ptr(), &raw mut entry, at, len, &raw mut found)
    };
    (error == 0 && !found.is_null()).then_some(entry.pw_uid)
}

/// The id of a group; none: there is none of that name.
pub fn gid_of(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; ENTRY_MAX_BYTES];
    // SAFETY: all zeros is a group.
    let mut entry: libc::group = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: as above.
    let error = unsafe {
        let (at, len) = (buffer.as_mut_ptr(), buffer.len());
        libc::getgrnam_r(name.as_ptr(), &raw mut entry, at, len, &raw mut found)
    };
    (error == 0 && !found.is_null()).then_some(entry.gr_gid)
}

/// Where projects have names, as xfs_quota(8) and others read them: a line `NAME:NUMBER` for each.
const PROJECTS: &str = "/etc/projid";
/// Longest such file, bytes.
const PROJECTS_MAX_BYTES: u64 = 1 << 20;

/// The number of a project; none: there is none of that name.
pub fn project_of(name: &str) -> Option<u32> {
    let mut text = String::new();
    let file = std::fs::File::open(PROJECTS).ok()?;
    file.take(PROJECTS_MAX_BYTES).read_to_string(&mut text).ok()?;
    project_in(&text, name)
}

fn project_in(text: &str, name: &str) -> Option<u32> {
    let lines = text.lines().filter_map(|line| line.trim().split_once(':'));
    lines.filter(|(known, _)| *known == name).find_map(|(_, number)| number.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projects_have_names() {
        let text = "# projects\nhome:1\nclimate : 2\nweather:3\nweather:x\n";
        assert_eq!(project_in(text, "weather"), Some(3));
        assert_eq!(project_in(text, "climate"), None);
        assert_eq!(project_in(text, "# projects"), None);
    }
}
