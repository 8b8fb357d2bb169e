//! JSON, as much of it as lines of measurements and `dray status --json` need.

use std::fmt::Write;

/// A JSON value. Numbers are doubles: none of ours needs more than 53 bits.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// Any number.
    Number(f64),
    /// A string.
    Text(String),
    /// An array.
    List(Vec<Value>),
    /// An object; order kept, the first of equal keys counts.
    Object(Vec<(String, Value)>),
}

/// Nesting that is followed; deeper input is refused, so that the stack is bounded.
const DEPTH_MAX: usize = 64;

impl Value {
    /// Parses the text of one value.
    pub fn parse(text: &str) -> Option<Value> {
        let mut parser = Parser { rest: text.as_bytes() };
        let value = parser.value(0)?;
        parser.space();
        parser.rest.is_empty().then_some(value)
    }

    /// The member `key` of an object.
    pub fn get(&self, key: &str) -> Option<&Value> {
        match self {
            Value::Object(members) => members.iter().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
        }
    }

    /// The number, if it is one.
    pub fn number(&self) -> Option<f64> {
        match self {
            Value::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// The text, if it is one.
    pub fn text(&self) -> Option<&str> {
        match self {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }
}

struct Parser<'a> {
    rest: &'a [u8],
}

impl Parser<'_> {
    fn space(&mut self) {
        while let [b' ' | b'\t' | b'\n' | b'\r', rest @ ..] = self.rest {
            self.rest = rest;
        }
    }

    fn eat(&mut self, word: &str) -> Option<()> {
        self.rest = self.rest.strip_prefix(word.as_bytes())?;
        Some(())
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH_MAX {
            return None;
        }
        self.space();
        match self.rest.first()? {
            b'n' => self.eat("null").map(|()| Value::Null),
            b't' => self.eat("true").map(|()| Value::Bool(true)),
            b'f' => self.eat("false").map(|()| Value::Bool(false)),
            b'"' => self.string().map(Value::Text),
            b'[' => self.list(depth),
            b'{' => self.object(depth),
            _ => self.number(),
        }
    }

    fn number(&mut self) -> Option<Value> {
        let length = self.rest.iter().take_while(|b| b"+-.eE0123456789".contains(b)).count();
        let (digits, rest) = self.rest.split_at(length);
        self.rest = rest;
        std::str::from_utf8(digits).ok()?.parse().ok().map(Value::Number)
    }

    fn string(&mut self) -> Option<String> {
        self.eat("\"")?;
        let mut bytes = Vec::new();
        loop {
            let (&byte, rest) = self.rest.split_first()?;
            self.rest = rest;
            match byte {
                b'"' => return String::from_utf8(bytes).ok(),
                b'\\' => self.escape(&mut bytes)?,
                _ => bytes.push(byte),
            }
        }
    }

    fn escape(&mut self, bytes: &mut Vec<u8>) -> Option<()> {
        let (&byte, rest) = self.rest.split_first()?;
        self.rest = rest;
        match byte {
            b'n' => bytes.push(b'\n'),
            b't' => bytes.push(b'\t'),
            b'r' => bytes.push(b'\r'),
            b'b' => bytes.push(8),
            b'f' => bytes.push(12),
            b'u' => {
                let digits = std::str::from_utf8(self.rest.get(..4)?).ok()?;
                let code = u32::from_str_radix(digits, 16).ok()?;
                self.rest = &self.rest[4..];
                let char = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
                bytes.extend(char.encode_utf8(&mut [0; 4]).as_bytes());
            }
            other => bytes.push(other),
        }
        Some(())
    }

    fn list(&mut self, depth: usize) -> Option<Value> {
        self.eat("[")?;
        let mut items = Vec::new();
        self.space();
        if self.eat("]").is_some() {
            return Some(Value::List(items));
        }
        loop {
            items.push(self.value(depth + 1)?);
            self.space();
            if self.eat("]").is_some() {
                return Some(Value::List(items));
            }
            self.eat(",")?;
        }
    }

    fn object(&mut self, depth: usize) -> Option<Value> {
        self.eat("{")?;
        let mut members = Vec::new();
        self.space();
        if self.eat("}").is_some() {
            return Some(Value::Object(members));
        }
        loop {
            self.space();
            let key = self.string()?;
            self.space();
            self.eat(":")?;
            members.push((key, self.value(depth + 1)?));
            self.space();
            if self.eat("}").is_some() {
                return Some(Value::Object(members));
            }
            self.eat(",")?;
        }
    }
}

/// `text` as a JSON string, quotes included.
pub fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for char in text.chars() {
        match char {
            '"' | '\\' => quoted.extend(['\\', char]),
            ' '.. => quoted.push(char),
            control => {
                let _ = write!(quoted, "\\u{:04x}", control as u32); // a String takes all
            }
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_every_kind_are_read() {
        let text = r#" {"a": [1, -2.5e1, "x\n\"é"], "b": {"c": true, "d": null}, "e": []} "#;
        let value = Value::parse(text).unwrap();
        let Some(Value::List(items)) = value.get("a") else { panic!("{value:?}") };
        assert_eq!(items[1].number(), Some(-25.0));
        assert_eq!(items[2].text(), Some("x\n\"é"));
        assert_eq!(value.get("b").unwrap().get("c"), Some(&Value::Bool(true)));
    }

    #[test]
    fn what_is_no_json_is_refused() {
        for text in ["", "{", "[1,]", "{\"a\" 1}", "\"open", "nul", "1 2", &"[".repeat(100_000)] {
            assert_eq!(Value::parse(text), None, "{:.20}", text);
        }
    }

    #[test]
    fn quoting_and_reading_are_inverse() {
        let text = "a \"b\" \\ \n \u{1} ü";
        assert_eq!(Value::parse(&quoted(text)), Some(Value::Text(text.to_owned())));
    }
}
