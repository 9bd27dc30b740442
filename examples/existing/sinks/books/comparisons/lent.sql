-- How many copies of each book are lent.
-- adds: 1 of book.lent
-- adds: -1 of book.returned
--
-- [source]
SELECT isbn AS key, lent AS total FROM loans_book;

-- [sink]
SELECT sink, isbn AS key, lent AS total FROM books_lent;
