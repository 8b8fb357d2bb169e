//! `dray key`, and the places where both ends look for a key.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use crate::args::KeyArgs;
use crate::error::Failure;
use crate::output;

/// Where both ends look for a key if none is named.
const DEFAULT: &str = "/etc/dray/key";
/// Random bytes of a key: as many as the proof by HMAC-SHA-256 makes use of.
const KEY_BYTES: usize = 32;

/// Makes a key in a file. Errors: it is there already, or cannot be written.
pub fn run(args: &KeyArgs) -> Result<(), Failure> {
    let path = args.file.as_deref().unwrap_or(Path::new(DEFAULT));
    let shown = path.display();
    let is_default = path == Path::new(DEFAULT);
    let dir_made = if is_default { make_dir(path) } else { Ok(()) };
    dir_made.and_then(|()| make(path)).map_err(|error| {
        let advice = match error.kind() {
            ErrorKind::AlreadyExists => {
                "; it may be in use: name another file, or remove it to make a new key"
            }
            ErrorKind::NotFound => "; make its directory first",
            ErrorKind::PermissionDenied => "; be root, or name a file of yours",
            _ => "",
        };
        Failure::new(format!("cannot make the key {shown}: {error}{advice}"))
    })?;
    let uses = match is_default {
        true => "servers started from now on use it".to_owned(),
        false => format!("name it at both ends, as psk:{shown}"),
    };
    output::print(format!(
        "made {shown}: bring it to the clients by a way that keeps it secret; {uses}\n"
    ))
}

/// Makes the directory of a key, which others may look into.
fn make_dir(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(dir) => fs::DirBuilder::new().recursive(true).mode(0o755).create(dir),
        None => Ok(()),
    }
}

/// Makes a file with a key for its owner alone. Errors: those of open(2) and write(2); it is there.
pub fn make(path: &Path) -> io::Result<()> {
    let mut key = [0; KEY_BYTES];
    dray_rt::random_bytes(&mut key);
    let mut text: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    text.push('\n');
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    if written.is_err() {
        let _ = fs::remove_file(path); // what is in it is no key
    }
    written
}

/// Whether there is a key where both ends look if none is named, and this user may read it. An
/// unsound one is there: it is complained of, and not done without.
pub fn is_there() -> bool {
    let missing = |error: &io::Error| {
        matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied)
    };
    File::open(DEFAULT).err().is_none_or(|error| !missing(&error))
}

/// What `auth` is where nothing is said.
pub fn default_auth() -> String {
    if is_there() { format!("psk:{DEFAULT}") } else { "none".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_rpc::auth::Key;

    #[test]
    fn a_key_is_made_once_for_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        make(&path).unwrap();
        let key = Key::from_file(&path).unwrap(); // which no other user may read
        assert_eq!(key.bytes().len(), 2 * KEY_BYTES);
        assert_eq!(make(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(Key::from_file(&path).unwrap().bytes(), key.bytes());
        make(&dir.path().join("other")).unwrap();
        assert_ne!(Key::from_file(&dir.path().join("other")).unwrap().bytes(), key.bytes());
    }
}
