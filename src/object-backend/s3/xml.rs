//! The two kinds of XML that a store answers with: a list of names, and an error.
//!
//! Names in a list are percent-encoded (`encoding-type=url`), so their text has no markup. The text of an element is
//! what lies between its tags; elements with other elements in them are never read as text.

use cleat_backend::uri::decode;

/// A part of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct List {
    /// The keys.
    pub(crate) keys: Vec<String>,
    /// The common prefixes of the keys that are not listed.
    pub(crate) prefixes: Vec<String>,
    /// The token with which the list continues.
    pub(crate) next: Option<String>,
}

/// Parses the answer to `ListObjectsV2` with `encoding-type=url`. `None` if it is malformed.
pub(crate) fn list(body: &[u8]) -> Option<List> {
    let text = std::str::from_utf8(body).ok()?;
    let result = elements(text, "ListBucketResult").next()?;
    let mut list = List::default();
    for object in elements(result, "Contents") {
        list.keys.push(name(object, "Key")?);
    }
    for prefix in elements(result, "CommonPrefixes") {
        list.prefixes.push(name(prefix, "Prefix")?);
    }
    if elements(result, "IsTruncated").next()?.trim() == "true" {
        list.next = Some(plain(elements(result, "NextContinuationToken").next()?));
    }
    Some(list)
}

/// Returns the code and the message of an error; empty texts if it has none.
pub(crate) fn error(body: &[u8]) -> (String, String) {
    let text = std::str::from_utf8(body).unwrap_or_default();
    let of = |tag| {
        let found = elements(text, tag).next().map(plain).unwrap_or_default();
        found.chars().filter(|c| !c.is_control()).take(200).collect()
    };
    (of("Code"), of("Message"))
}

/// Returns the contents of the elements with this tag, in their order. An element that is not closed ends the list.
fn elements<'a>(text: &'a str, tag: &str) -> impl Iterator<Item = &'a str> {
    let (open, close) = (format!("<{tag}"), format!("</{tag}>"));
    let mut rest = text;
    std::iter::from_fn(move || {
        loop {
            let begin = rest.find(&open)? + open.len();
            rest = &rest[begin..];
            let (attributes, content) = rest.split_once('>')?;
            // Another tag may begin with the same letters.
            if !attributes.is_empty() && !attributes.starts_with([' ', '\t', '\r', '\n', '/']) {
                continue;
            }
            if attributes.ends_with('/') {
                rest = content;
                return Some("");
            }
            let (inside, after) = content.split_once(&close)?;
            rest = after;
            return Some(inside);
        }
    })
}

fn name(text: &str, tag: &str) -> Option<String> {
    // Spaces are encoded as plus signs, and plus signs as %2B.
    let encoded = elements(text, tag).next()?.replace('+', " ");
    String::from_utf8(decode(&encoded).ok()?).ok()
}

fn plain(text: &str) -> String {
    let entities =
        [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&amp;", "&")];
    entities.iter().fold(text.to_owned(), |text, (entity, is)| text.replace(entity, is))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read() {
        let body = "<?xml version=\"1.0\"?>\n<ListBucketResult xmlns=\"http://s3\"><Name>b</Name>\
                    <Prefix>v/</Prefix><KeyCount>2</KeyCount><IsTruncated>true</IsTruncated>\
                    <NextContinuationToken>a&amp;b=</NextContinuationToken>\
                    <Contents><Key>v%2Flog/a+b%2B</Key><Size>1</Size></Contents>\
                    <Contents>\n<Key>v/c</Key></Contents>\
                    <CommonPrefixes><Prefix>v/d/</Prefix></CommonPrefixes></ListBucketResult>";
        let expected = List {
            keys: vec!["v/log/a b+".into(), "v/c".into()],
            prefixes: vec!["v/d/".into()],
            next: Some("a&b=".into()),
        };
        assert_eq!(list(body.as_bytes()), Some(expected));
        let empty =
            "<ListBucketResult><Prefix/><IsTruncated>false</IsTruncated></ListBucketResult>";
        assert_eq!(list(empty.as_bytes()), Some(List::default()));
    }

    #[test]
    fn a_malformed_list_is_refused() {
        let whole = |inner: &str| format!("<ListBucketResult>{inner}</ListBucketResult>");
        for text in [
            String::new(),
            "<html>busy</html>".to_owned(),
            "<ListBucketResult><IsTruncated>false</IsTruncated>".to_owned(),
            whole(""),
            whole("<IsTruncated>true</IsTruncated>"),
            whole("<IsTruncated>false</IsTruncated><Contents><Size>1</Size></Contents>"),
            whole("<IsTruncated>false</IsTruncated><Contents><Key>%4</Key></Contents>"),
            whole("<IsTruncated>false</IsTruncated><Contents><Key>%ff</Key></Contents>"),
        ] {
            assert_eq!(list(text.as_bytes()), None, "{text}");
        }
        assert_eq!(list(&[0xff]), None);
    }

    #[test]
    fn an_error_has_a_code_and_a_message() {
        let body = b"<?xml?><Error><Code>NoSuchKey</Code><Message>a &lt;b&gt;\n</Message></Error>";
        assert_eq!(error(body), ("NoSuchKey".to_owned(), "a <b>".to_owned()));
        assert_eq!(error(b"busy"), (String::new(), String::new()));
        assert_eq!(error(b"<Code>a"), (String::new(), String::new()));
    }
}
