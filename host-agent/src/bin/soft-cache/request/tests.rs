//! Tests of the parser of requests.

use proptest::prelude::*;

use super::*;

/// Parses all requests in a stream that arrives in parts. Returns the arguments of each request, and the error at
/// which the parser stopped.
fn parse_parts(parts: &[&[u8]], limits: RequestLimits) -> (Vec<Vec<Vec<u8>>>, Option<ProtocolError>) {
    let mut parser = RequestParser::default();
    let mut received = Vec::new();
    let mut requests = Vec::new();
    for part in parts {
        received.extend_from_slice(part);
        loop {
            match parser.parse(&received, limits) {
                Ok(Some(len)) => {
                    requests.push(parser.request(&received).arguments_from(0).map(<[u8]>::to_vec).collect());
                    parser.finish();
                    received.drain(..len);
                }
                Ok(None) => break,
                Err(error) => return (requests, Some(error)),
            }
        }
    }
    (requests, None)
}

fn parse(bytes: &[u8]) -> (Vec<Vec<Vec<u8>>>, Option<ProtocolError>) {
    parse_parts(&[bytes], RequestLimits::Full)
}

#[test]
fn pipelined_requests_are_parsed() {
    let (requests, error) =
        parse(b"*2\r\n$3\r\nGET\r\n$1\r\na\r\nPING\r\n*1\r\n$0\r\n\r\n*0\r\n*-1\r\n\r\n*1\r\n$2\r\n\r");
    assert_eq!(error, None);
    let expected: [&[&[u8]]; 6] = [&[b"GET", b"a"], &[b"PING"], &[b""], &[], &[], &[]];
    assert_eq!(requests, expected);
}

#[test]
fn inline_arguments_are_unquoted() {
    for (line, expected) in [
        ("  set  a\tb  \r\n", vec!["set", "a", "b"]),
        ("echo \"a b\\n\\x41\\\"\\t\\q\"\n", vec!["echo", "a b\nA\"\tq"]),
        ("echo 'it\\'s \\n' \"\" x\n", vec!["echo", "it's \\n", "", "x"]),
        ("echo a\"b c\" d\n", vec!["echo", "ab c", "d"]),
        ("\n", vec![]),
    ] {
        let expected: Vec<_> = expected.iter().map(|text| text.as_bytes().to_vec()).collect();
        assert_eq!(parse(line.as_bytes()), (vec![expected], None), "{line:?}");
    }
    for line in ["echo \"a\n", "echo 'a\n", "echo \"a\"b\n", "echo \"a\\\"\n"] {
        assert_eq!(parse(line.as_bytes()).1, Some(ProtocolError::UnbalancedQuotes), "{line:?}");
    }
}

#[test]
fn violations_have_the_texts_of_redis() {
    let long = [b'1'; 70_000];
    let long_count = [b"*", &long[..]].concat();
    let long_length = [b"*1\r\n$", &long[..]].concat();
    for (bytes, expected) in [
        (&b"*1000000000\r\n"[..], "invalid multibulk length"),
        (b"*65537\r\n", "invalid multibulk length"),
        (b"*99999999999999999999\r\n", "invalid multibulk length"),
        (b"*one\r\n", "invalid multibulk length"),
        (b"*\r\n", "invalid multibulk length"),
        (b"*1\n", "invalid multibulk length"),
        (b"*1\r\n$1000000000\r\n", "invalid bulk length"),
        (b"*1\r\n$-1\r\n", "invalid bulk length"),
        (b"*1\r\n$x\r\n", "invalid bulk length"),
        (b"*1\r\n*1\r\n$1\r\na\r\n", "expected '$', got '*'"),
        (b"*1\r\n\r\n", "expected '$', got '\\r'"),
        (b"*1\r\n$1\r\nabc", "expected CRLF after bulk string"),
        (&long_count, "too big mbulk count string"),
        (&long_length, "too big bulk count string"),
        (&long, "too big inline request"),
    ] {
        let (requests, error) = parse(bytes);
        assert_eq!((requests.len(), error.map(|error| error.to_string())), (0, Some(expected.to_owned())));
    }
    let two = [b"*3\r\n$1\r\na\r\n".to_vec(), argument(16 << 20), b"$16777216\r\n".to_vec()].concat();
    assert_eq!(parse(&two).1, Some(ProtocolError::RequestTooLong));
}

fn argument(len: usize) -> Vec<u8> {
    [format!("${len}\r\n").as_bytes(), &vec![b'x'; len], b"\r\n"].concat()
}

#[test]
fn new_clients_have_lower_limits() {
    let parse =
        |bytes: &[u8]| parse_parts(&[bytes], RequestLimits::NewClient).1.map(|error| error.to_string());
    assert_eq!(parse(b"*10\r\n"), None);
    assert_eq!(parse(b"*11\r\n").as_deref(), Some("unauthenticated multibulk length"));
    assert_eq!(parse(b"*1\r\n$16384\r\n"), None);
    assert_eq!(parse(b"*1\r\n$16385\r\n").as_deref(), Some("unauthenticated bulk length"));
}

#[test]
fn declared_sizes_allocate_nothing() {
    let mut parser = RequestParser::default();
    assert_eq!(parser.parse(b"*65536\r\n$16777216\r\n", RequestLimits::Full), Ok(None));
    assert!(parser.memory_bytes() < 4096);
}

/// Returns streams of valid requests, sometimes with garbage at a position.
fn streams() -> impl Strategy<Value = Vec<u8>> {
    let arguments = prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..5);
    let request = prop_oneof![
        4 => arguments.prop_map(|arguments: Vec<Vec<u8>>| {
            let mut bytes = format!("*{}\r\n", arguments.len()).into_bytes();
            for argument in arguments {
                bytes.extend(format!("${}\r\n", argument.len()).into_bytes());
                bytes.extend(argument);
                bytes.extend(b"\r\n");
            }
            bytes
        }),
        1 => "[ -~]{0,30}\r?\n".prop_map(String::into_bytes),
    ];
    (
        prop::collection::vec(request, 0..6),
        prop::option::weighted(0.3, (any::<prop::sample::Index>(), any::<u8>())),
    )
        .prop_map(|(requests, garbage)| {
            let mut bytes = requests.concat();
            if let Some((index, byte)) = garbage
                && !bytes.is_empty()
            {
                let position = index.index(bytes.len());
                bytes[position] = byte;
            }
            bytes
        })
}

proptest! {
    #[test]
    fn any_split_of_a_stream_gives_the_same_requests(
        bytes in streams(),
        splits in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
    ) {
        let mut positions: Vec<usize> = splits.iter().map(|index| index.index(bytes.len() + 1)).collect();
        positions.extend([0, bytes.len()]);
        positions.sort_unstable();
        let parts: Vec<&[u8]> = positions.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
        let whole = parse(&bytes);
        prop_assert_eq!(&parse_parts(&parts, RequestLimits::Full), &whole);
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        prop_assert_eq!(&parse_parts(&single, RequestLimits::Full), &whole);
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        parse(&bytes);
    }
}
