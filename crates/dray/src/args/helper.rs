//! The command line of mount(8)'s helpers.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use super::{Args, parse};

/// Arguments as mount(8) passes them to its helpers: `mount.dray SPEC DIR [-sfnv] [-N NS]
/// [-o OPTIONS] [-t TYPE]`; `mount.fuse.dray` is what it looks for by the type that
/// /proc/mounts shows. None if we were not called so.
pub fn helper_args() -> Option<Args> {
    let mut words = std::env::args_os();
    let name = words.next().map(PathBuf::from)?;
    let mut words: Vec<OsString> = words.collect();
    let is_helper = |word: &OsStr| word == "mount.dray" || word == "mount.fuse.dray";
    if !is_helper(name.file_name()?) {
        if words.first().is_none_or(|first| !is_helper(first)) {
            return None;
        }
        words.remove(0);
    }
    // mount(8) knows 1 for wrong arguments, which clap would end with 2.
    Some(parse(translate(words), 1))
}

/// From the words of mount(8) to ours.
fn translate(words: Vec<OsString>) -> Vec<OsString> {
    let mut ours: Vec<OsString> = vec!["dray".into(), "mount".into(), "--helper".into()];
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        match word.to_str() {
            Some("-N" | "-t") => drop(words.next()),
            Some(flags) if is_helper_flags(flags) => {
                // Sloppiness and the mount table are no concern of ours.
                if flags.contains('f') {
                    ours.push("--fake".into());
                }
                if flags.contains('v') {
                    ours.push("--verbose".into());
                }
            }
            _ => ours.push(word),
        }
    }
    ours
}

fn is_helper_flags(word: &str) -> bool {
    let flags = word.strip_prefix('-').unwrap_or_default();
    !flags.is_empty() && flags.chars().all(|flag| "sfnv".contains(flag))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use clap::Parser;

    #[test]
    fn the_words_of_mount_become_ours() {
        let words = ["dray://h/x", "/mnt", "-sfn", "-v", "-o", "rw,nosuid", "-t", "dray"];
        let ours = translate(words.iter().map(Into::into).collect());
        let args = Args::try_parse_from(ours).unwrap();
        assert_eq!(args.verbose, 1);
        let Command::Mount(mount) = args.command else { panic!("not a mount") };
        assert!(mount.fake && !mount.foreground);
        assert_eq!(mount.options, ["rw,nosuid"]);
        assert_eq!(mount.mountpoint.to_str(), Some("/mnt"));
    }
}
