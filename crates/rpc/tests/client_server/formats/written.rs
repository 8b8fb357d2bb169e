//! Lines of a name and bytes in hexadecimal digits.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::Path;

use dray_rpc::wire::{Input, Wire};

/// The bytes that were written under each name.
pub struct Written {
    file: &'static str,
    lines: BTreeMap<String, Vec<u8>>,
    /// Lines that are not there so far.
    new: String,
}

impl Written {
    /// The lines of a file beside this one; those that begin with `#` are for people.
    pub fn in_file(file: &'static str) -> Written {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/client_server/formats").join(file);
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        let parse = |line: &str| {
            let (name, digits) = line.split_once(' ').unwrap_or((line, ""));
            (name.to_owned(), bytes_of(digits))
        };
        Written { file, lines: lines.map(parse).collect(), new: String::new() }
    }

    /// The bytes that were written as `name`, which must be the bytes written `now`.
    pub fn same(&mut self, name: &str, now: &[u8]) -> Vec<u8> {
        let Some(then) = self.lines.remove(name) else {
            self.new += &format!("{name} {}\n", digits_of(now));
            return now.to_vec();
        };
        let (file, digits) = (self.file, digits_of(now));
        assert_eq!(digits, digits_of(&then), "{file}: {name} is written in another way now");
        then
    }

    /// The bytes that were written as `name` by a former version, which wrote it in another way.
    pub fn formerly(&mut self, name: &str) -> Vec<u8> {
        self.lines.remove(name).unwrap_or_else(|| panic!("{}: no {name}", self.file))
    }

    /// The same of a value, which must be what is read.
    pub fn value<T: for<'a> Wire<'a> + PartialEq + Debug>(&mut self, name: &str, value: T) {
        let mut now = Vec::new();
        value.put(&mut now);
        let then = self.same(name, &now);
        assert_eq!(Input::whole::<T>(&then), Ok(value), "{}: {name}", self.file);
    }

    /// Every line was asked for, and there is one for everything.
    pub fn end(self) {
        let Written { file, lines, new } = self;
        assert!(lines.is_empty(), "{file}: nobody reads {:?} any more", lines.keys());
        assert!(new.is_empty(), "{file} has no lines for what is new:\n{new}");
    }
}

fn digits_of(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes_of(digits: &str) -> Vec<u8> {
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.as_bytes().chunks(2).map(byte).collect()
}
